"""What codecs cost and what they lose: speed, bits for each parameter, and error, of every codec in diloco/codecs.

Speed is in GB/s of fp32 input, chunk by chunk as in a round, beside a plain copy of the same memory and hivemind's own 8-bit
codecs. All take turns, and the best of many turns counts: what else the machine does then matters little, as long as it
leaves as many cores as there are threads. The error is the L2 norm of what is lost over that of the input, on Gaussian
values and on ones with heavy tails (Student's t with 3 degrees of freedom).

    python tests/benchmarks/codecs.py [--quick]
"""

import argparse
import json
import time
import warnings
from typing import Any, Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from diloco.reduction import CHUNK
from islands import plugins

#: What an exchange process uses, and what this benchmark is about.
THREADS = (1, 2)
NUM_CHUNKS = 8

Way = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor], Callable[[Any], int]]


def ours(name: str) -> Way:
    """Encode, decode, and count bytes by a codec of this project."""
    module = plugins.load("diloco.codecs", name)
    codec = module.build(module.Config())
    return codec.encode, lambda encoded: codec.decode(encoded, CHUNK, torch.float32), Tensor.numel


def of_hivemind(name: str) -> Way:
    """The same by one of hivemind's, which makes a message of it."""
    import hivemind.compression as compression

    codec = getattr(compression, name)()
    info = compression.CompressionInfo.from_tensor(torch.empty(CHUNK))
    return lambda values: codec.compress(values, info), codec.extract, lambda message: len(message.buffer)


def copy() -> Way:
    """A plain copy each way: as fast as memory is."""
    there, back = torch.empty(CHUNK), torch.empty(CHUNK)
    return there.copy_, back.copy_, lambda values: values.numel() * values.itemsize


def ways() -> tuple[dict[str, Way], dict[str, str]]:
    """All that can be measured here, and why some can't."""
    found: dict[str, Way] = {"memcpy": copy(), **{name: ours(name) for name in plugins.available("diloco.codecs")}}
    failures = {}
    for name in ("Uniform8BitQuantization", "Quantile8BitQuantization"):
        try:
            way = of_hivemind(name)
            way[1](way[0](torch.randn(CHUNK)))
            found[f"hivemind {name.removesuffix('Quantization')}"] = way
        except Exception as error:  # whatever it is that its versions can't do together
            failures[f"hivemind {name}"] = f"{type(error).__name__}: {error}"
    return found, failures


def draws() -> dict[str, Tensor]:
    """(CHUNK,) values of the size of pseudo-gradients, always the same."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(4, CHUNK, generator=generator) * 1e-3
    return {"gaussian": normal[0], "heavy": normal[0] / (normal[1:].square().sum(0) / 3).sqrt() * 1e-3}


def loss_of(way: Way) -> dict[str, float]:
    """Bits for each parameter, and relative errors; NaN where it decodes to that."""
    encode, decode, num_bytes = way
    results = {}
    for kind, values in draws().items():
        encoded = encode(values.clone())
        results[f"bits_{kind}"] = num_bytes(encoded) * 8 / CHUNK
        decoded = decode(encoded).view(-1)
        results[f"error_{kind}"] = float((decoded.double() - values.double()).norm() / values.double().norm())
    return results


def speeds(found: dict[str, Way], seconds: float) -> dict[str, tuple[float, float]]:
    """GB/s of encoding and decoding with the threads that are set, each the best of the turns that ``seconds`` allow."""
    chunks = list(torch.randn(NUM_CHUNKS, CHUNK) * 1e-3)
    encoded = {name: [encode(chunk) for chunk in chunks] for name, (encode, _, _) in found.items()}
    best = {name: [float("inf")] * 2 for name in found}
    began = time.perf_counter()
    while time.perf_counter() < began + seconds:
        for name, (encode, decode, _) in found.items():
            for side, work, items in ((0, encode, chunks), (1, decode, encoded[name])):
                started = time.perf_counter()
                for item in items:
                    work(item)
                best[name][side] = min(best[name][side], time.perf_counter() - started)
    gigabytes = NUM_CHUNKS * CHUNK * 4 / 1e9
    return {name: (gigabytes / encode, gigabytes / decode) for name, (encode, decode) in best.items()}


def show(results: dict[str, dict[str, float]], failures: dict[str, str]) -> None:
    """A table for people."""
    columns = [f"{side}, {threads} thread{'s' * (threads > 1)}" for threads in THREADS for side in ("encode", "decode")]
    table = Table("codec", *columns, "bits/parameter", "error, Gaussian", "error, heavy", title="GB/s of fp32 input")
    for name, row in results.items():
        rates = [f"{row[f'{side}_gb_s_{threads}']:.2f}" for threads in THREADS for side in ("encode", "decode")]
        errors = [f"{row[key]:.5f}" for key in ("relative_error", "relative_error_heavy")]
        table.add_row(name, *rates, f"{row['bits_per_parameter']:.3f}", *errors)
    console = Console(width=150)
    console.print(table)
    for name, reason in failures.items():
        console.print(f"{name} failed: {reason}")


def main() -> None:
    """Print the table, and as the last line its figures as JSON; those without a number of threads are of two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="ten seconds instead of a minute for each number of threads")
    quick = parser.parse_args().quick
    warnings.filterwarnings("ignore")  # hivemind's own
    found, failures = ways()
    results: dict[str, dict[str, float]] = {}
    for name, way in found.items():
        loss = loss_of(way)
        results[name] = {
            "bits_per_parameter": loss["bits_gaussian"],
            "relative_error": loss["error_gaussian"],
            "relative_error_heavy": loss["error_heavy"],
        }
    for threads in THREADS:
        torch.set_num_threads(threads)
        for name, (encode, decode) in speeds(found, seconds=10.0 if quick else 60.0).items():
            results[name] |= {f"encode_gb_s_{threads}": encode, f"decode_gb_s_{threads}": decode}
    for row in results.values():
        row["encode_gb_s"], row["decode_gb_s"] = row["encode_gb_s_2"], row["decode_gb_s_2"]
    show(results, failures)
    rounded = {name: {key: float(f"{value:.4g}") for key, value in row.items()} for name, row in results.items()}
    print(json.dumps({"codecs": rounded, "failures": failures}))


if __name__ == "__main__":
    main()
