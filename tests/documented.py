"""Prints what `make docs` writes pages of, as pdoc takes it: every module of the package, then, behind an exclamation
mark, those that cannot be imported here. Kernels in Triton, for one, need PyTorch's CUDA build."""

import importlib
import pkgutil

import mktts


def importable(name: str) -> bool:
    if name.endswith(".__main__"):  # runs where it is imported
        return False
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


if __name__ == "__main__":
    names = [module.name for module in pkgutil.walk_packages(mktts.__path__, "mktts.")]
    # pdoc takes a package's modules with it: what cannot be imported must be named to be left out
    print("mktts", *names, *(f"!{name}" for name in names if not importable(name)), sep="\n")
