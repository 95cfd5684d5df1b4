"""The version of this package, and of those that figures depend on."""

__version__ = "0.1.0"


def package_versions() -> dict[str, str]:
    """Versions of the packages that what was measured depends on."""
    from importlib import metadata  # not needed to say one's own version

    return {package: metadata.version(package) for package in ("gated-attention", "torch", "transformers")}
