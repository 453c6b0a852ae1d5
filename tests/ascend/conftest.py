"""The tests in ``lane`` need torch_npu on the fake runtime: ``test_lane.py`` runs them, in their own environment."""
import os

collect_ignore = [] if os.environ.get("FAKE_NPU_CAPACITY") else ["lane"]
