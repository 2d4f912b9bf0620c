"""What islands of a simulation do that others don't: their speed, when they leave, when they join."""

from typing import NamedTuple, Sequence

from pydantic import Field, model_validator

from islands.config_file import ConfigError, Section


class Life(NamedTuple):
    """From when to when an island takes part, in inner steps of the run; ``leaves`` is None where it stays to the end."""

    joins: int = 0
    leaves: int | None = None

    def holds(self, step: int) -> bool:
        """Whether it is there when the run has done so many steps."""
        return self.joins <= step and (self.leaves is None or step < self.leaves)


class IslandScript(Section):
    """One island's part. One that leaves before it joins was there from the start, and comes back."""

    island: int = Field(..., ge=0, description="which one, from 0")
    speed: float = Field(1.0, gt=0, description="how fast it steps; 0.5 takes twice exchange.step_seconds for a step")
    leaves: int | None = Field(None, ge=1, description="it is gone once it has done this inner step of the run")
    joins: int | None = Field(None, ge=1, description="it comes when the first island has done this inner step of the run")

    @model_validator(mode="after")
    def _leaves_or_joins(self) -> "IslandScript":
        if self.leaves is not None and self.leaves == self.joins:
            raise ValueError(f"island {self.island} leaves and joins at step {self.joins}; give two steps, or neither")
        return self

    @property
    def lives(self) -> tuple[Life, ...]:
        """When it takes part, in their order."""
        if self.joins is None:
            return (Life(0, self.leaves),)
        if self.leaves is None or self.joins < self.leaves:
            return (Life(self.joins, self.leaves),)
        return Life(0, self.leaves), Life(self.joins)


def parts(script: Sequence[IslandScript], islands: int) -> list[IslandScript]:
    """The part of each of so many islands, those included of whom the script says nothing."""
    told = {each.island: each for each in script}
    return [told.get(island) or IslandScript(island=island) for island in range(islands)]


def check_script(script: Sequence[IslandScript], islands: int, steps: int) -> None:
    """Whether so many islands can follow a script, in a run of so many steps.

    Raises:
        ConfigError: it names an island that isn't there, or one twice, or a step that never comes, or nobody is left.
    """
    names = [each.island for each in script]
    for name in names:
        if name >= islands:
            raise ConfigError(
                f"exchange.script: there is no island {name} with swarm.islands={islands}, whose last one is island {islands - 1}"
            )
        if names.count(name) > 1:
            raise ConfigError(f"exchange.script: island {name} has {names.count(name)} entries; put all of it into one")
    lives = [life for each in parts(script, islands) for life in each.lives]
    changes = {each.island: [step for step in (each.joins, each.leaves) if step is not None] for each in script}
    for name, wanted in changes.items():
        if late := [step for step in wanted if step >= steps]:
            raise ConfigError(
                f"exchange.script: island {name} changes at step {late[0]}, and the run ends with step {steps} (train.steps); "
                f"give steps up to {steps - 1}"
            )
    for step in [0, *sorted(step for wanted in changes.values() for step in wanted)]:
        # who comes needs someone who is there before
        if not any(life.holds(step) and (life.joins < step or step == 0) for life in lives):
            raise ConfigError(
                f"exchange.script: at step {step} no island is there that was there before; let one stay, from which the others go on"
            )
