"""Images: ``mr.images.decode(...)`` is what ``Feed(decode=...)`` takes for records that hold JPEG, PNG, WebP or pixels."""

from millrace.images.decode import ImageDecode as ImageDecode
from millrace.images.options import decode as decode

__all__ = ["ImageDecode", "decode"]
