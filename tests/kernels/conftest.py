from __future__ import annotations

import pytest

from tests.kernels.suite import EXPANDS


@pytest.fixture(params=EXPANDS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Linears that are laid are expanded by this one."""
    from hf_multilora.kernels import triton_laid

    for name, value in EXPANDS[request.param].items():
        monkeypatch.setattr(triton_laid, name, value)
    return str(request.param)
