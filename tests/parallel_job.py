"""What every process of the jobs in tests/test_parallel.py runs: ``python parallel_job.py FOLDER``.

``FOLDER/plan.json`` says which logits are to be computed, by all workers, and then which texts are to be generated, by
rank 0 and those that serve it. Results go to the folder, too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np


def logits(here: Any, folder: Path, model: str, ids: list[int], number: int) -> None:
    """Of one request that is read at once: each worker writes what it has, float32 [tokens, V]."""
    from forward import Forward

    from ms_spec.models.parallel import Shard

    whole = Forward(model, shard=Shard(here.rank, here.size))
    np.save(folder / f"logits_{number}_{here.rank}.npy", whole.grid(np.array([ids]), np.zeros(1), np.zeros(1, int))[0])


def main() -> None:
    folder = Path(sys.argv[1])
    plan = json.loads((folder / "plan.json").read_text())
    from ms_spec import LLM, SamplingParams
    from ms_spec.world import world

    here = world()
    assert here is not None
    if here.rank is not None:
        for number, (model, ids) in enumerate(plan["logits"]):
            logits(here, folder, model, ids, number)
    texts: dict[str, Any] = {}
    for name, engine in plan["engines"].items():
        llm = LLM(**engine)
        # Only rank 0 comes here.
        with (folder / "came").open("a") as came:
            came.write(f"{here.rank}\n")
        params = SamplingParams(temperature=0, max_tokens=plan["max_tokens"], ignore_eos=True)
        outputs = llm.generate(plan["prompts"], params, use_tqdm=False)
        metrics = llm.metrics()
        texts[name] = {
            "ids": [output.outputs[0].token_ids for output in outputs],
            "errors": [output.error for output in outputs],
            "drafted": metrics.num_draft_tokens,
            "accepted": metrics.num_accepted_tokens,
        }
        if "speculative_config" in engine:
            without = llm.generate(plan["prompts"][0], params, use_tqdm=False, num_speculative_tokens=0)
            texts[name]["undrafted"] = without[0].outputs[0].token_ids
        sampled = SamplingParams(temperature=0.8, seed=3, max_tokens=8, ignore_eos=True)
        texts[name]["sampled"] = [llm.generate(plan["prompts"][0], sampled, use_tqdm=False)[0].outputs[0].token_ids]
        shaped = SamplingParams(
            temperature=0, max_tokens=8, ignore_eos=True, frequency_penalty=2, allowed_token_ids=plan["allowed"]
        )
        texts[name]["shaped"] = llm.generate(plan["prompts"][0], shaped, use_tqdm=False)[0].outputs[0].token_ids
        llm.close()
    (folder / "texts.json").write_text(json.dumps(texts))


if __name__ == "__main__":
    main()
