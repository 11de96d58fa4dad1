"""optax is an extra: what needs it imports it when it is called."""


def import_optax(op):
    try:
        import optax
    except ImportError:
        raise ImportError(f"{op}: expected optax to be installed; pip install 'jaxcgx[optax]'") from None
    return optax
