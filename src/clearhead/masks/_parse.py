from clearhead.masks._mask import Mask


def parse(text: str) -> Mask:
    raise NotImplementedError
