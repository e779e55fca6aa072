"""FlashInfer's API over fir. Modules are named as FlashInfer names them.

CPU tensors work as CUDA tensors do. ``install()`` makes ``import flashinfer`` find this package.
"""

from __future__ import annotations

#: The version of FlashInfer whose API this is; consumers check it.
__version__ = "0.6.17"
