"""What a configuration file may say, and what one reads when it can't be used."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from small import small_config

from diloco.config import RunConfig
from islands.config import OUTER_SECTIONS, IslandConfig
from islands.config_file import ConfigError, dump_config, load_config, parse_config
from islands.island import load_corpus, meta_model
from islands.mesh import check_grid

#: Those of a run; of a sweep, each cell is tested by itself.
CONFIGS = [path for path in sorted((Path(__file__).parents[2] / "configs").glob("**/*.yaml")) if not path.stem.startswith("sweep_")]

#: The least that must be given; in memory, so that no test here depends on the network's packages.
LEAST = "train: {steps: 10, global_batch_size: 4}\nexchange: {type: in_memory}\n"


def load(folder: Path, text: str, *overrides: str) -> RunConfig:
    file = folder / "run.yaml"
    file.write_text(text, encoding="utf-8")
    return load_config(RunConfig, file, overrides)


def problems(folder: Path, text: str, *overrides: str) -> list[str]:
    """The problems that are told, a line each, without the line that names the file."""
    with pytest.raises(ConfigError) as refused:
        load(folder, text, *overrides)
    lines = str(refused.value).splitlines()
    return [line.strip() for line in lines[1:]] if lines[0] == f"{folder / 'run.yaml'} can't be used:" else lines


def problem(folder: Path, *overrides: str) -> str:
    """The only problem that ``overrides`` make."""
    (only,) = problems(folder, LEAST, *overrides)
    return only


# What is read.


def test_a_command_line_overrides_the_file_which_overrides_the_defaults(tmp_path: Path) -> None:
    text = LEAST + "optimizer: {lr: 0.5, beta1: 0.5}\n"
    config = load(tmp_path, text, "optimizer.lr=0.25")
    assert (config.optimizer.lr, config.optimizer.beta1, config.optimizer.beta2) == (0.25, 0.5, 0.95)


def test_the_last_of_two_overrides_counts(tmp_path: Path) -> None:
    assert load(tmp_path, LEAST, "train.steps=20", "train.steps=30").train.steps == 30


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "0.001", "1.e-3", "+1e-3", ".1e-2", "1.0e-3"])
def test_a_number_may_have_an_exponent_in_file_and_override(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, LEAST + f"optimizer: {{lr: {text}}}\n").optimizer.lr == 1e-3
    assert load(tmp_path, LEAST, f"optimizer.lr={text}").optimizer.lr == 1e-3


def test_quotes_keep_a_number_text(tmp_path: Path) -> None:
    assert load(tmp_path, LEAST, 'run.name="1e-3"').run.name == "1e-3"


def test_an_override_may_be_a_list_or_hold_an_equals_sign(tmp_path: Path) -> None:
    address = "/ip4/127.0.0.1/tcp/1/p2p/QmX"
    assert load(tmp_path, LEAST, f"swarm.initial_peers=[{address}]").swarm.initial_peers == [address]
    assert load(tmp_path, LEAST, "run.dir=runs/a=b").run.dir == "runs/a=b"


def test_a_section_that_is_empty_or_missing_holds_its_defaults(tmp_path: Path) -> None:
    empty = load(tmp_path, LEAST + "run:\nmodel:\nparallel:\nouter:\n  optimizer:\nswarm:\n")
    assert empty == load(tmp_path, LEAST)
    assert load(tmp_path, LEAST + "swarm:\n", "swarm.islands=2").swarm.islands == 2


def test_the_folder_follows_the_name_unless_it_is_given(tmp_path: Path) -> None:
    assert load(tmp_path, LEAST, "run.name=first").run.dir == "runs/first"
    assert load(tmp_path, LEAST, "run.name=first", "run.dir=elsewhere/").run.dir == "elsewhere"
    assert load(tmp_path, LEAST, "run.dir=~/x").run.dir == str(Path.home() / "x")


def test_a_preset_gives_the_sizes_that_are_not_given(tmp_path: Path) -> None:
    model = load(tmp_path, LEAST, "model.preset=15M", "model.num_layers=3").model
    assert (model.hidden_size, model.num_layers, model.num_heads) == (384, 3, 6)


@pytest.mark.parametrize("overrides", [[], ["optimizer.type=sgd", "run.name='1e-3'", "swarm.listen='[::1]:80'"]])
def test_what_is_dumped_loads_as_an_equal_configuration(tmp_path: Path, overrides: list[str]) -> None:
    config = load(tmp_path, LEAST, *overrides)
    again = load(tmp_path, dump_config(config))
    assert again == config
    assert again != load(tmp_path, LEAST, *overrides, "outer.optimizer.momentum=0.8")


def test_a_configuration_survives_pickling() -> None:
    config = small_config(model=dict(tied_embeddings=True))
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_configuration_never_changes() -> None:
    with pytest.raises(ValueError, match="frozen"):
        small_config().train.steps = 3


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_committed_configuration_loads(path: Path) -> None:
    run = load_config(RunConfig, path)
    alone = load_config(IslandConfig, path, ignore=OUTER_SECTIONS)
    assert run.outer.sync_every <= run.train.steps
    assert alone.model == run.model and alone.train == run.train
    assert parse_config(RunConfig, run.model_dump()) == run
    check_grid(run, max(1, run.parallel.data_parallel_size))


def test_there_are_committed_configurations() -> None:
    assert "quickstart" in [path.stem for path in CONFIGS]


def test_an_island_alone_refuses_outer_sections_unless_told_to_skip_them(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(LEAST)
    with pytest.raises(ConfigError, match="exchange: unknown key"):
        load_config(IslandConfig, tmp_path / "run.yaml")
    load_config(IslandConfig, tmp_path / "run.yaml", ["outer.nonsense=1"], ignore=OUTER_SECTIONS)


# What is refused, in which words.


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("modle=3", "modle: unknown key (did you mean 'model'?)"),
        ("train.stepz=3", "train.stepz: unknown key (did you mean 'steps'?)"),
        ("model.hiden_size=3", "model.hiden_size: unknown key (did you mean 'hidden_size'?)"),
        ("outer.optimizer.momentun=3", "outer.optimizer.momentun: unknown key (did you mean 'momentum'?)"),
        ("outer.zzz=3", "outer.zzz: unknown key; the keys here are sync_every, left_out, optimizer, codec"),
        ("outer.left_out=keep", "outer.left_out: 'keep' should be 'carry' or 'drop'"),
        ("data.paths=[a]", "data.paths: unknown key; the keys of data.type=python_stdlib are type, seq_len, held_out"),
        ("3=4", "3: unknown key; the keys here are run, model, data, parallel, optimizer, train, checkpoint, outer, exchange"),
        ("model.type=lama", "model.type: 'lama' is not one of llama (did you mean 'llama'?)"),
        ("optimizer.type=3", "optimizer.type: 3 is not one of adamw, sgd"),
        ("optimizer.type=[sgd]", "optimizer.type: ['sgd'] is not one of adamw, sgd"),
        ("data.type=base", "data.type: 'base' is not one of python_stdlib, text"),
        ("outer.codec.type=nine", "statistical2, topk (did you mean 'none'?)"),
        ("model.preset=2B", "model.preset: '2B' should be 'quickstart', '15M', '60M', '150M', '1B' or '7B'"),
        ("model.preset=[15M]", "model.preset: ['15M'] should be 'quickstart', '15M', '60M', '150M', '1B' or '7B'"),
        ("train.steps=abc", "train.steps: 'abc' should be a whole number"),
        ("train.steps=1.5", "train.steps: 1.5 should be a whole number"),
        ("train.steps=1e2", "train.steps: 100.0 should be a whole number; write 100"),
        ("train.steps=true", "train.steps: True should be a whole number"),
        ("train.steps=0", "train.steps: 0 should be greater than or equal to 1"),
        ("train.steps=", "train.steps: is empty; should be a whole number"),
        ("optimizer.lr='3'", "optimizer.lr: '3' should be a number"),
        ("optimizer.lr=-1", "optimizer.lr: -1 should be greater than 0"),
        ("optimizer.lr=.nan", "optimizer.lr: nan should be a finite number"),
        ("optimizer.lr=.inf", "optimizer.lr: inf should be a finite number"),
        ("exchange.peer_timeout=-.inf", "exchange.peer_timeout: -inf should be a finite number"),
        ("run.tensorboard=1", "run.tensorboard: 1 should be true or false"),
        ("run.name=2024", 'run.name: 2024 should be text; put it in quotes: "2024"'),
        ("run.name=2024-05-01", "put it in quotes: \"2024-05-01\""),
        ("run.name=''", "run.name: '' should not be empty"),
        ("run.name=a b/c", "only letters, digits and . _ -, and not begin with . or -; such as a-b-c"),
        ("run.name=..", "run.name: '..' should hold"),
        ("run=3", "run: 3 should be a section with keys of its own"),
        ("train=[1]", "train: [1] should be a section with keys of its own"),
        ("model=[1]", "model: [1] should be a section with keys of its own"),
        ("optimizer=sgd", "optimizer: 'sgd' should be a section with keys of its own, as in optimizer.type=sgd"),
        ("swarm.initial_peers=a", "swarm.initial_peers: 'a' should be a list such as [a, b]"),
        ("swarm.initial_peers=[3]", "swarm.initial_peers.0: 3 should be text"),
        ("data.type=text", "data.paths: must be given (files, or patterns such as books/**/*.txt)"),
        ("data={type: text, paths: []}", "data.paths: [] should not be empty"),
    ],
)  # fmt: skip
def test_a_wrong_key_or_value_is_named_with_its_rule(tmp_path: Path, override: str, told: str) -> None:
    assert told in problem(tmp_path, override)



@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("train.steps.x=3", "train.steps.x: train.steps holds 10 and has no keys below it"),
        ("train.steps.x.y=3", "train.steps.x.y: train.steps holds 10 and has no keys below it"),
        ("train.steps", "'train.steps' is not of the form key.sub=value, for example train.steps=100"),
        ("=3", "'=3' is not of the form key.sub=value"),
        ("train..steps=3", "'train..steps=3' is not of the form key.sub=value"),
        ("swarm.listen=[::1]:80", "needs quotes that the shell leaves, for example 'swarm.listen=\"[::1]:80\"'"),
    ],
)
def test_an_override_that_makes_no_sense(tmp_path: Path, override: str, told: str) -> None:
    assert told in problem(tmp_path, override)


def test_the_remedy_for_an_override_that_needs_quotes_works(tmp_path: Path) -> None:
    assert load(tmp_path, LEAST, 'swarm.listen="[::1]:80"').swarm.listen == "[::1]:80"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["model.num_heads=5"],
            "model.num_heads=5 does not cut model.hidden_size=128 into heads of even size; the nearest that does is 4",
        ),
        (["model.num_heads=128"], "the nearest that does is 64"),
        (["model.hidden_size=3"], "model.hidden_size=3 is odd, and rotary embedding turns pairs; the nearest even"),
        (
            ["model.num_kv_heads=3"],
            "model.num_kv_heads=3 does not divide model.num_heads=4; sizes that do: 1, 2, 4",
        ),
        (["model.num_kv_heads=8"], "sizes that do: 1, 2, 4"),
        (
            ["optimizer.warmup_steps=11"],
            "optimizer.warmup_steps=11 is more than train.steps=10; warm up for at most all of the steps",
        ),
        (
            ["exchange.round_deadline=1"],
            "exchange.round_deadline=1.0 is shorter than exchange.peer_timeout=30.0; a round must outlast",
        ),
        (["exchange.min_islands=9"], "exchange.min_islands=9 is more than swarm.max_slots=8"),
        (["swarm.islands=9"], "swarm.islands=9 is more than swarm.max_slots=8; raise max_slots"),
        (["swarm.slot=8"], "swarm.slot=8 is not below swarm.max_slots=8; the last slot is 7"),
        (["swarm.listen=0.0.0.0:31337"], "or set swarm.public: true to let anyone in; or listen on 127.0.0.1"),
        (["swarm.listen=0.0.0.0:31337"], "Make one with 'diloco key new'"),
        (["swarm.key_file=missing.key"], "missing.key: No such file or directory. Copy the key file of this swarm here"),
        (["swarm.key_file=/dev/null"], "/dev/null is not a regular file"),
        (["swarm.data_connections=17"], "swarm.data_connections: 17"),
        (["swarm.data_connections=4", "swarm.listen=127.0.0.1:65532"], "choose a port up to 65531"),
        (
            ["swarm.data_connections=4", "swarm.announce=1.2.3.4:7"],
            "so swarm.listen=127.0.0.1:0 must name its port too",
        ),
        (["swarm.listen=10.0.0.1:31337"], "swarm.listen=10.0.0.1:31337 is reachable by others"),
        (["swarm.listen=localhost:80"], "swarm.listen: 'localhost:80' should be IP:PORT, for example 127.0.0.1:31337"),
        (["swarm.listen=127.0.0.1"], "swarm.listen: '127.0.0.1' should be IP:PORT"),
        (["swarm.listen=''"], "swarm.listen: '' should be IP:PORT"),
        (["swarm.listen=127.0.0.1:65536"], "swarm.listen: '127.0.0.1:65536' should end with a port from 0 to 65535"),
        (["swarm.announce=1.2.3.4:x"], "swarm.announce: '1.2.3.4:x' should end with a port from 0 to 65535"),
        (["swarm.initial_peers=[10.0.0.1:80]"], "'10.0.0.1:80' is not an address such as /ip4/10.0.0.1/tcp/"),
        (["swarm.initial_peers=[/ip4/1.2.3.4/tcp/1]"], "the first island prints the one to use"),
        (["swarm.initial_peers=[/ip4/1.2.3.4/tcp/1/p2p/]"], "is not an address"),
        (["swarm.initial_peers=[/p2p/QmX]"], "is not an address"),
        (["swarm.initial_peers=[/ip4/1.2.3.4/tcp/1/p2p/Qm...]"], "is not an address"),  # copied from a message
    ],
)  # fmt: skip
def test_values_that_do_not_go_together(tmp_path: Path, overrides: list[str], told: str) -> None:
    text = problem(tmp_path, *overrides)
    assert told in text
    assert text.count(overrides[0].partition("=")[0]) == 1  # the key is there, and not twice


@pytest.mark.parametrize(
    "overrides",
    [
        ["swarm.listen=0.0.0.0:31337", "swarm.public=true"],
        ["swarm.listen=127.0.0.2:0"],
        ["swarm.data_connections=4", "swarm.listen=127.0.0.1:65531"],
        ["swarm.data_connections=16", "swarm.announce=1.2.3.4:7", "swarm.listen=127.0.0.1:7"],
        ["swarm.slot=7"],
        ["swarm.initial_peers=[/dns4/island.example.org/udp/1/quic/p2p/QmX, /ip6/::1/tcp/1/p2p/QmX]"],
        ["exchange.min_islands=8"],
        ["optimizer.warmup_steps=10"],
    ],
)
def test_the_nearest_values_that_do_go_together(tmp_path: Path, overrides: list[str]) -> None:
    assert isinstance(load(tmp_path, LEAST, *overrides), RunConfig)


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    overrides = ["run.seed=x", "model.type=gpt", "optimizer.lr=-1", "outer.codec.tpye=none", "swarm.slot=8", "bad=3"]
    told = problems(tmp_path, LEAST, *overrides, "train={}")
    keys = ["run.seed", "model.type", "optimizer.lr", "train.steps", "train.global_batch_size"]
    assert [line.partition(":")[0] for line in told[:5]] == keys
    assert told[5].startswith("outer.codec.tpye: unknown key (did you mean 'type'?)")
    assert told[6].startswith("swarm.slot=8") and told[7].startswith("bad: unknown key")
    assert len(told) == 8


# The file itself.


def test_a_missing_file_is_named_with_the_nearest_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").write_text(LEAST)
    with pytest.raises(ConfigError, match=r"quikstart.yaml: no such file \(did you mean 'quickstart.yaml'\?\)"):
        load_config(RunConfig, tmp_path / "quikstart.yaml")
    with pytest.raises(ConfigError, match="nowhere/x.yaml: no such file. Give the path of a YAML file"):
        load_config(RunConfig, tmp_path / "nowhere" / "x.yaml")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("train:\n  steps: 1\n    x: 3\n", "is not valid YAML: line 3, column 6: mapping values are not allowed here"),
        ("train:\n  steps: 1\n  steps: 2\n", "is not valid YAML: line 2, column 3: the key 'steps' is given twice"),
        ("- 1\n", "expected sections such as 'train:', found a list"),
        ("words\n", "expected sections such as 'train:', found a text"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str, told: str) -> None:
    assert told in problems(tmp_path, text)[0]


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"run: \xff\xfe\n")
    with pytest.raises(ConfigError, match="is not valid YAML: 'utf-8' codec can't decode"):
        load_config(RunConfig, tmp_path / "run.yaml")


def test_a_file_is_utf8_whatever_the_locale(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("dir: läufe\n", encoding="utf-8")
    program = (
        "import sys; from islands.config import RunSection; from islands.config_file import load_config\n"
        "print(ascii(load_config(RunSection, sys.argv[1]).dir))"
    )
    environment = {**os.environ, "PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", program, str(tmp_path / "run.yaml")]
    assert subprocess.run(command, env=environment, capture_output=True, text=True).stdout.strip() == r"'l\xe4ufe'"


# Checks that need more than the file.


@pytest.mark.parametrize(
    ("sections", "world_size", "told"),
    [
        (dict(train=dict(global_batch_size=9)), 2, "train.global_batch_size: 9 sequences don't divide among 2 "
         "data-parallel ranks; the nearest that do are 8 and 10"),
        (dict(train=dict(global_batch_size=1)), 4, "the nearest that do are 4"),
        (dict(train=dict(micro_batch_size=3)), 2, "train.micro_batch_size: 3 does not divide the 4 sequences of each "
         "rank; sizes that do: 1, 2, 4"),
        (dict(parallel=dict(data_parallel_size=2)), 3, "parallel: data_parallel_size 2 x tensor_parallel_size 1 x "
         "pipeline_parallel_size 1 = 2 ranks, but this island has 3. Set data_parallel_size to 3 (or -1: the rest)"),
        (dict(parallel=dict(data_parallel_size=2, pipeline_parallel_size=2)), 2, "= 4 ranks, but this island has 2. Set "
         "data_parallel_size to 1 (or -1: the rest), or start 4 ranks"),
        (dict(parallel=dict(pipeline_parallel_size=4)), 2, "parallel: tensor_parallel_size 1 x pipeline_parallel_size 4 = 4 does "
         "not divide the 2 ranks of this island. Start 4 ranks, or use sizes whose product divides 2"),
        (dict(parallel=dict(data_parallel_size=0)), 2, "parallel.data_parallel_size: 0 is not a number of ranks"),
        (dict(parallel=dict(tensor_parallel_size=4), model=dict(vocab_size=256)), 4, "parallel.tensor_parallel_size: 4 does not "
         "divide model.num_kv_heads=2; sizes that divide these and all else that is shared: 1, 2"),
        (dict(parallel=dict(tensor_parallel_size=5), model=dict(vocab_size=255, hidden_size=40)), 5, "5 does not divide "
         "model.num_heads=4 and model.num_kv_heads=2 and model.intermediate_size=72; sizes that divide these and all else that is "
         "shared: 1"),
        (dict(parallel=dict(tensor_parallel_size=3), model=dict(vocab_size=6)), 3, "3 does not divide model.num_heads=4 and "
         "model.num_kv_heads=2 and model.hidden_size=32;"),
        (dict(parallel=dict(tensor_parallel_size=2)), 2, "2 does not divide the padded vocabulary (model.vocab_size=257, "
         "model.pad_vocab_to_multiple_of=1)=257; sizes that divide these and all else that is shared: 1. To round the vocabulary "
         "up, set model.pad_vocab_to_multiple_of to a multiple of 2"),
        (dict(parallel=dict(tensor_parallel_size=2, sequence_parallel=True), model=dict(vocab_size=256), data=dict(seq_len=17)), 2,
         "tensor_parallel_size=2 ranks can't share data.seq_len=17 positions evenly; the nearest lengths that they can are 16 and 18"),
        (dict(parallel=dict(tensor_parallel_size=2), model=dict(vocab_size=256), train=dict(compile=True)), 2,
         "train.compile: true does not go with parallel.tensor_parallel_size=2: torch.compile fails"),
    ],
)  # fmt: skip
def test_a_grid_that_does_not_fit(sections: dict[str, dict], world_size: int, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_grid(small_config(**sections), world_size)
    assert told in str(refused.value)


def test_a_grid_that_fits() -> None:
    grid = check_grid(small_config(train=dict(micro_batch_size=2)), 4)
    assert (grid.data, grid.shard, grid.world_size) == (4, 4, 4)
    cut = small_config(parallel=dict(tensor_parallel_size=2, sequence_parallel=True), model=dict(pad_vocab_to_multiple_of=2))
    assert str(check_grid(cut, 4)) == "pipeline 1 x replicate 1 x shard 2 x tensor 2"


def test_the_vocabulary_is_padded_as_the_config_says_whatever_the_grid() -> None:
    model = meta_model(small_config(model=dict(pad_vocab_to_multiple_of=64)))
    assert model.embed_tokens.weight.shape[0] == model.lm_head.weight.shape[0] == 320


def test_missing_data_files_are_named_with_where_they_were_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        load_corpus(small_config(data=dict(type="text", paths=["books/*.txt"])))
    assert str(refused.value) == f"data.paths: 'books/*.txt' matches no file; paths are relative to {tmp_path}"


def test_text_too_short_for_a_sequence_and_a_vocabulary_too_small(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text("short")
    text = dict(type="text", paths=[str(tmp_path / "*")])
    with pytest.raises(ConfigError, match="data.seq_len: 500 is more than the .* tokens of the training text"):
        load_corpus(small_config(data=dict(**text, seq_len=500)))
    with pytest.raises(ConfigError, match="model.vocab_size"):
        load_corpus(small_config(data=dict(**text, seq_len=2), model=dict(vocab_size=100), train=dict(eval_sequences=1)))
    with pytest.raises(ConfigError, match="train.eval_sequences: 4 sequences .* more than the 2 in the held-out text"):
        load_corpus(small_config(data=dict(**text, seq_len=2)))


@pytest.mark.parametrize(
    ("outer", "feedback", "decay"),
    [
        (dict(), False, 1.0),
        (dict(codec=dict(type="int4")), False, 1.0),
        (dict(codec=dict(type="topk")), True, 0.95),
        (dict(codec=dict(type="statistical2"), residual_decay=1.0), True, 1.0),
        (dict(codec=dict(type="topk"), error_feedback=False), False, 0.95),
        (dict(adaptive=dict(target=0.9, codecs=["int4", "topk"])), True, 0.95),
        (dict(adaptive=dict(codecs=["int4", "topk"])), False, 1.0),
        (dict(adaptive=dict(target=0.9, codecs=["int4"])), False, 1.0),
    ],
)
def test_codecs_of_few_bits_have_error_feedback_unless_told_otherwise(outer: dict, feedback: bool, decay: float) -> None:
    section = small_config(outer=outer).outer
    assert (section.error_feedback, section.residual_decay) == (feedback, decay)


@pytest.mark.parametrize(
    ("outer", "told"),
    [
        (dict(overlap=-1), "outer.overlap=-1 should be inner steps"),
        (dict(overlap=31), "outer.overlap=31 is longer than outer.sync_every=30"),
        (dict(overlap="eager", merge_alpha=0.5), "outer.merge_alpha=0.5 has no meaning with outer.overlap=eager"),
        (dict(fragments=3, sync_every=2), "outer.fragments=3 can't take turns in outer.sync_every=2"),
        (dict(late="skip"), "wait"),
        (dict(separate_embeddings=True), "outer.fragments=1 is the whole model; give at least 2"),
    ],
)
def test_rounds_that_could_not_land_are_refused(outer: dict, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        small_config(outer=outer)
