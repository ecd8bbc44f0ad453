"""What can go wrong with a model, as one clear line each. Needs no torch."""


class ModelError(ValueError):
    """A model cannot be found, fetched or loaded. The message is one line and says the remedy."""


class UnknownModelError(ModelError):
    """A name is neither a known short name, a path that exists, nor a hub name."""


class FetchError(ModelError):
    """A model could not be downloaded, or what arrived is not what was expected."""


class DamagedModelError(ModelError):
    """Files of a model are missing, incomplete or altered."""
