from __future__ import annotations

import pytest
from distributed.utils_test import cleanup, loop, loop_in_thread  # noqa: F401  (fixtures)

pytest.register_assert_rewrite("tests.helpers")
