"A short GRPO run is real: weights moved, no record is missing or double, and every reward comes out again."
import json
import sys
from importlib.resources import files
from pathlib import Path

from safetensors.torch import load_file

from atlas_rlvr.rewards import rescore
from atlas_rlvr.runs import read_lines, record_key, run_folder


def moved(before: dict, after: dict) -> float:
    "The largest change of any weight."
    return max(float((after[name].float() - weights.float()).abs().max()) for name, weights in before.items() if name in after)


def main(project: str):
    folder = run_folder("subtask", "embedded", 0, Path(project))
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    records = read_lines(folder / "rollouts.jsonl")
    trained = [record for record in records if record["phase"] == "train"]
    expected = run["batches"] * run["config"]["prompts_per_batch"] * run["config"]["num_generations"]
    assert run["batches"] == 3 and len(trained) == expected, (run["batches"], len(trained), expected)
    assert len({record_key(record) for record in records}) == len(records), "a key stands twice"
    assert {record["phase"] for record in records} == {"train", "before", "after"}

    change = moved(load_file(files("atlas_rlvr") / "data" / "policy" / "model.safetensors"),
                   load_file(folder / run["checkpoint"] / "model.safetensors"))
    assert change > 0, "no weight moved"

    report = rescore(folder / "rollouts.jsonl")
    assert report["equal"] == report["records"] - report["skipped"] > 0 and not report["differences"], report["differences"]
    assert (Path(project) / "results/subtask/05_train.ipynb").is_file()
    print(f"{len(trained)} training rollouts of {run['batches']} batches, {report['equal']} rewards equal on scoring again, "
          f"largest change of a weight {change:.1e}")


if __name__ == "__main__":
    main(sys.argv[1])
