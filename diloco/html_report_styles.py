"""Which colour and line a setting has, the same in all pictures of a page."""

from typing import Any

from diloco.report_study import Setting, Study

#: Of middle lightness: they are seen on white and on black.
_RAMP = ("#3b82f6", "#06b6d4", "#22a35a", "#d99a06", "#e8590c", "#d6336c")
_LINES, _MARKERS = ("-", "--", ":", "-."), ("o", "s", "^", "v")


class Styles:
    """Colours follow the first key in which settings differ, lines and markers what they differ in beside it."""

    plain = _RAMP[0]
    baseline = "#868e96"

    def __init__(self, study: Study) -> None:
        self._key = next((key for key in study.keys if len({str(each.keys.get(key)) for each in study.islands}) > 1), None)
        self._values = list(dict.fromkeys(map(self._value, study.islands)))
        self._rests = list(dict.fromkeys(map(self._rest, study.islands)))

    def line(self, setting: Setting) -> dict[str, Any]:
        """Arguments for matplotlib's ``plot``."""
        if setting.is_baseline:
            return dict(color=self.baseline, linestyle=(0, (4, 2)), marker="")
        rest = self._rests.index(self._rest(setting))
        color = _ramp(self._values.index(self._value(setting)), len(self._values))
        return dict(color=color, linestyle=_LINES[rest % len(_LINES)], marker=_MARKERS[rest % len(_MARKERS)])

    def _value(self, setting: Setting) -> str:
        return str(setting.keys.get(self._key)) if self._key else setting.label

    def _rest(self, setting: Setting) -> str:
        return str({key: value for key, value in setting.keys.items() if key != self._key})


def _ramp(index: int, count: int) -> str:
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    if count <= len(_RAMP):
        return _RAMP[round(index * (len(_RAMP) - 1) / max(1, count - 1))]
    return to_hex(LinearSegmentedColormap.from_list("settings", _RAMP)(index / (count - 1)))
