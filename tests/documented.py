"""Prints what `make docs` writes pages of, as pdoc takes it: every module of the package, then, behind an exclamation
mark, those that cannot be imported here. Kernels in Triton, for one, need PyTorch's CUDA build."""

import importlib
import pkgutil

import mktts


def documented() -> list[str]:
    """pdoc takes a package's modules with it, so what cannot be imported must be named to be left out."""
    names = [module.name for module in pkgutil.walk_packages(mktts.__path__, "mktts.")]
    return ["mktts", *names, *(f"!{name}" for name in names if not importable(name))]


def importable(name: str) -> bool:
    if name.endswith(".__main__"):  # runs where it is imported
        return False
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


if __name__ == "__main__":
    print("\n".join(documented()))
