"""The sections that describe how islands work together, and the configuration of a whole run."""

import ipaddress
import re
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from diloco.swarm_key import read_key
from islands import plugins
from islands.config import IslandConfig
from islands.config_file import Plugin, PluginSection, Section

#: Where an island listens, and who it is: /ip4/10.0.0.1/tcp/31337/p2p/ and a peer id in base58.
_ADDRESS = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/[^/\s]+/(tcp|udp)/\d{1,5}(/[^/\s]+)*/p2p/[1-9A-HJ-NP-Za-km-z]+")

_SECONDS = re.compile(r"\d+(\.\d+)?s", re.ASCII)
_FEW_BITS = 4  # for each parameter: below that, what encoding loses is most of it
#: Most ``swarm.data_connections``; what an island may tell the others.
MAX_DATA_CONNECTIONS = 16


class OuterOptimizerSection(PluginSection):
    """Keys that every outer optimizer has."""

    lr: float = Field(0.7, gt=0, description="outer learning rate")
    warmup_rounds: int = Field(0, ge=0, description="rounds of a fragment over which the outer learning rate rises linearly")
    decay: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="how the outer learning rate falls from the start of the run to its end"
    )
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="linear and cosine end at this share of lr")


class CodecSection(PluginSection):
    """Keys that every codec has."""


class AdaptiveSection(Section):
    """Cheaper codecs and rarer rounds where links are too slow, agreed by all islands at the edges of rounds."""

    target: float = Field(
        0.0, ge=0, lt=1, description="share of the time in which islands are to compute, such as 0.95; 0: nothing adapts"
    )
    codecs: list[str] = Field([], description="cheaper codecs to fall back to, after outer.codec, by name: [int4, topk]")
    max_sync_every: int = Field(500, ge=1, description="most inner steps between two rounds of a fragment")


class OuterSection(Section):
    """What islands agree on, and how often."""

    sync_every: int | str = Field(
        30, description="H: inner steps between two rounds of a fragment; or seconds, such as 90s, where islands differ in speed"
    )
    left_out: Literal["carry", "drop"] = Field(
        "carry", description="work that a round went on without: kept for the next round, or dropped for the new anchor"
    )
    optimizer: Annotated[OuterOptimizerSection, Plugin("diloco.outer_optimizers", "sgd")]
    codec: Annotated[CodecSection, Plugin("diloco.codecs", "none")]
    error_feedback: bool | None = Field(
        None, description="add what encoding loses to the next contribution; by default where a codec of fewer than 4 bits may be used"
    )
    residual_decay: float | None = Field(
        None, gt=0, le=1, description="share of what was lost that is kept from round to round; by default 0.95 below 4 bits, else 1"
    )
    fragments: int = Field(1, ge=1, le=256, description="parts of the model that take turns in rounds, each once in sync_every")
    fragment_pattern: Literal["strided", "contiguous"] = Field(
        "strided", description="which blocks make up a fragment: every n-th, or those that follow each other"
    )
    separate_embeddings: bool = Field(
        False, description="embeddings and output head make up a fragment of their own; else they go to the smallest"
    )
    overlap: int | Literal["eager"] = Field(
        0,
        description="tau: inner steps that a round has until it lands; eager: until the next one, and meanwhile training goes on "
        "from where the island's own movement takes the anchor",
    )
    merge_alpha: float = Field(
        0.0, ge=0, lt=1, description="share of an island's own parameters that is kept when a round lands; 0: take the anchor"
    )
    late: Literal["wait", "land_late"] = Field(
        "wait", description="when a round is not in after overlap steps: wait for it, or train on and land it as soon as it is in"
    )
    adaptive: AdaptiveSection = AdaptiveSection()

    @field_validator("sync_every", mode="before")
    @classmethod
    def _is_steps_or_seconds(cls, value: Any) -> int | str:
        if type(value) is int and value >= 1:  # bool is an int, too
            return value
        if isinstance(value, str) and _SECONDS.fullmatch(value) and float(value[:-1]) > 0:
            return value
        raise ValueError(f"{value!r} is neither inner steps, a whole number from 1 such as 30, nor seconds such as 90s or 1.5s")

    @model_validator(mode="after")
    def _few_bits_need_error_feedback(self) -> "OuterSection":
        fallbacks = self.adaptive.codecs if self.adaptive.target else []
        known = [name for name in fallbacks if name in plugins.available("diloco.codecs")]  # others are refused below
        codecs = [self.codec, *(plugins.load("diloco.codecs", name).Config() for name in known)]
        few = min(plugins.build("diloco.codecs", codec).bits for codec in codecs) < _FEW_BITS
        for key, default in dict(error_feedback=few, residual_decay=0.95 if few else 1.0).items():
            if getattr(self, key) is None:
                object.__setattr__(self, key, default)  # values never change, and until now there was none
        return self

    @model_validator(mode="after")
    def _rounds_land(self) -> "OuterSection":
        if isinstance(self.overlap, int) and self.overlap < 0:
            raise ValueError(f"outer.overlap={self.overlap} should be inner steps, a whole number from 0, or eager")
        if isinstance(self.overlap, int) and isinstance(self.sync_every, int) and self.overlap > self.sync_every:
            raise ValueError(
                f"outer.overlap={self.overlap} is longer than outer.sync_every={self.sync_every}: a round has to land before the "
                f"next one of its fragment is launched; give at most {self.sync_every}"
            )
        if self.overlap == "eager" and self.merge_alpha:
            raise ValueError(
                f"outer.merge_alpha={self.merge_alpha} has no meaning with outer.overlap=eager, which goes on from a guess of "
                "the anchor instead of a mixture; leave one of the two out"
            )
        if self.separate_embeddings and self.fragments == 1:
            raise ValueError(
                "outer.separate_embeddings=true gives embeddings and head a fragment of their own, and outer.fragments=1 is the "
                "whole model; give at least 2"
            )
        if isinstance(self.sync_every, int) and self.fragments > self.sync_every:
            raise ValueError(
                f"outer.fragments={self.fragments} can't take turns in outer.sync_every={self.sync_every} inner steps; "
                f"give at most {self.sync_every}"
            )
        return self

    @model_validator(mode="after")
    def _can_adapt(self) -> "OuterSection":
        adaptive = self.adaptive
        if adaptive.target and not isinstance(self.sync_every, int):
            raise ValueError(
                f"outer.adaptive.target={adaptive.target} changes how many inner steps lie between two rounds, and "
                f"outer.sync_every={self.sync_every} counts seconds; give steps, or leave adaptive out"
            )
        bits = plugins.build("diloco.codecs", self.codec).bits
        names = plugins.available("diloco.codecs")
        for name in adaptive.codecs:
            if name not in names:
                hint = plugins.did_you_mean(name, names)
                raise ValueError(f"outer.adaptive.codecs: {name!r} is not one of {', '.join(names)}{hint}")
            before, bits = bits, plugins.build("diloco.codecs", plugins.load("diloco.codecs", name).Config()).bits
            if bits >= before:
                raise ValueError(
                    f"outer.adaptive.codecs: {name} takes {bits:.3g} bits for each parameter and the codec before it "
                    f"{before:.3g}; name them from the richest to the cheapest, all of them cheaper than outer.codec"
                )
        if adaptive.target and adaptive.max_sync_every < self.sync_every:
            raise ValueError(
                f"outer.adaptive.max_sync_every={adaptive.max_sync_every} is less than outer.sync_every={self.sync_every}, from "
                "which it starts"
            )
        return self

    @property
    def sync_seconds(self) -> float | None:
        """Seconds between two rounds of the same fragment; None where ``sync_every`` counts inner steps."""
        return float(self.sync_every[:-1]) if isinstance(self.sync_every, str) else None


class ExchangeSection(PluginSection):
    """Keys that every exchange has."""

    peer_timeout: float = Field(30.0, gt=0, description="seconds without a sign of life until an island counts as gone")
    round_deadline: float = Field(300.0, gt=0, description="seconds that one round may take in all")
    min_islands: int = Field(1, ge=1, description="fewer members than this never commit a round")
    max_weight_ratio: float = Field(
        10.0, ge=1, description="no island weighs more than this many times the median of the members' tokens"
    )

    @model_validator(mode="after")
    def _deadline_is_longer(self) -> "ExchangeSection":
        if self.round_deadline < self.peer_timeout:
            raise ValueError(
                f"exchange.round_deadline={self.round_deadline} is shorter than exchange.peer_timeout={self.peer_timeout}; "
                "a round must outlast the detection of a lost island"
            )
        return self


class SwarmSection(Section):
    """Who takes part and where they meet."""

    islands: int = Field(1, ge=1, description="islands that must be there before training starts")
    max_slots: int = Field(8, ge=1, le=64, description="most islands that may ever take part at once; fixes the data order")
    slot: int = Field(-1, ge=-1, description="this island's place, 0 to max_slots-1; -1: given by the first island")
    initial_peers: list[str] = Field([], description="addresses of islands to join through; empty: this is the first island")
    listen: str = Field("127.0.0.1:0", description="host:port that other islands connect to; port 0: any free one")
    announce: str = Field("", description="host:port that others are told, where it differs from listen (behind NAT)")
    identity_file: str = Field("", description="file with this island's private key; made when missing; empty: a new one")
    key_file: str = Field("", description="file of 'diloco key new'; keeps out all who don't have it; empty: no key")
    public: bool = Field(False, description="allow listening beyond loopback while there is no swarm key")
    data_connections: int = Field(
        0,
        ge=0,
        le=MAX_DATA_CONNECTIONS,
        description="connections to each island that carry bulk bytes beside the one for messages; 0: that one does",
    )
    join_timeout: float = Field(120.0, gt=0, description="seconds to wait for the other islands at the start")

    @field_validator("listen", "announce")
    @classmethod
    def _is_host_and_port(cls, value: str, info: ValidationInfo) -> str:
        if not value and info.field_name == "announce":
            return value
        host, _, port = value.rpartition(":")
        try:
            ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        except ValueError:
            raise ValueError("should be IP:PORT, for example 127.0.0.1:31337") from None
        if not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
            raise ValueError("should end with a port from 0 to 65535")
        return value

    @field_validator("initial_peers")
    @classmethod
    def _are_addresses(cls, value: list[str]) -> list[str]:
        for address in value:
            if not _ADDRESS.fullmatch(address):
                raise ValueError(
                    f"{address!r} is not an address such as /ip4/10.0.0.1/tcp/31337/p2p/Qm...; "
                    "the first island prints the one to use"
                )
        return value

    @field_validator("key_file")
    @classmethod
    def _holds_a_key(cls, value: str) -> str:
        if value:
            read_key(value)
        return value

    @model_validator(mode="after")
    def _fits(self) -> "SwarmSection":
        if self.islands > self.max_slots:
            raise ValueError(f"swarm.islands={self.islands} is more than swarm.max_slots={self.max_slots}; raise max_slots")
        if self.slot >= self.max_slots:
            raise ValueError(
                f"swarm.slot={self.slot} is not below swarm.max_slots={self.max_slots}; the last slot is {self.max_slots - 1}"
            )
        return self

    @model_validator(mode="after")
    def _keeps_strangers_out(self) -> "SwarmSection":
        host = ipaddress.ip_address(self.listen.rpartition(":")[0].strip("[]"))
        if not host.is_loopback and not self.key_file and not self.public:
            raise ValueError(
                f"swarm.listen={self.listen} is reachable by others and the swarm has no key: anyone who finds it may take "
                "part. Make one with 'diloco key new', copy it to every island and set swarm.key_file; or set "
                "swarm.public: true to let anyone in; or listen on 127.0.0.1"
            )
        return self

    @model_validator(mode="after")
    def _data_connections_have_ports(self) -> "SwarmSection":
        for name in ("listen", "announce"):
            port = int(getattr(self, name).rpartition(":")[2] or 0)
            if port and port + self.data_connections > 65535:
                raise ValueError(
                    f"swarm.data_connections={self.data_connections} take the ports after that of swarm.{name}="
                    f"{getattr(self, name)}, and the last port is 65535; choose a port up to {65535 - self.data_connections}"
                )
        if self.data_connections and self.announce and self.listen.endswith(":0"):
            raise ValueError(
                f"swarm.announce={self.announce} with swarm.data_connections={self.data_connections} names the ports after "
                f"it, so swarm.listen={self.listen} must name its port too, for example 31337"
            )
        return self


class RunConfig(IslandConfig):
    """A whole run: one island's sections and the outer ones."""

    outer: OuterSection
    exchange: Annotated[ExchangeSection, Plugin("diloco.exchange", "hivemind")]
    swarm: SwarmSection = SwarmSection()

    @model_validator(mode="after")
    def _fits_the_exchange(self) -> "RunConfig":
        check = getattr(plugins.load("diloco.exchange", self.exchange.type), "check", None)
        if check:
            check(self)
        return self

    @model_validator(mode="after")
    def _rounds_can_commit(self) -> "RunConfig":
        if self.exchange.min_islands > self.swarm.max_slots:
            raise ValueError(
                f"exchange.min_islands={self.exchange.min_islands} is more than swarm.max_slots={self.swarm.max_slots}: "
                f"no round could ever commit; give at most {self.swarm.max_slots}"
            )
        return self
