"""polyreme.utils.download: weights by URL."""

from polyreme.io.download import fetch, weights_folder


def get_weights_path_from_url(url: str, md5sum: str | None = None) -> str:
    """The path of a file of weights, fetched once from an http(s) or file URL into polyreme/weights of the cache.

    md5sum: checked, also of a file that is there already. Raises DataError if it cannot be had or is another file.
    """
    return str(fetch(url, weights_folder(), md5=md5sum))


__all__ = ["get_weights_path_from_url"]
