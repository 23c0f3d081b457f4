"""What the parser must do with any bytes; run as a script, a coverage-guided fuzzer looks for bytes with which it does not.

    pip install atheris && python tests/fuzz_parser.py FOLDER -max_total_time=600

FOLDER keeps what was found interesting, so a later run goes on from there.
"""
import json
import sys
from pathlib import Path

if __name__ == "__main__":  # what is imported here is watched by the fuzzer
    import atheris
    with atheris.instrument_imports(include=["atlas_rlvr.tool_calls"]):
        from atlas_rlvr.tool_calls import OUTCOMES, build_trace, call_from_json, call_to_json, normalise, parse_message
else:
    from atlas_rlvr.tool_calls import OUTCOMES, build_trace, call_from_json, call_to_json, normalise, parse_message

SEEDS = Path(__file__).with_name("parser_seeds.json")


def seeds() -> list[bytes]:
    "Inputs to start from: each kind of message, and what once went wrong."
    return [seed.encode("utf-8", "surrogatepass") for seed in json.loads(SEEDS.read_text(encoding="utf-8"))]


def message_of(data: bytes):
    "A message where the bytes are JSON, as a server sends it; else the text of a completion."
    text = data.decode("utf-8", "surrogateescape")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def as_transcript(message) -> list:
    "The message with an answer, or the whole transcript where it is one."
    if isinstance(message, list):
        return message
    spoken = message if isinstance(message, dict) else {"content": message}
    return [{"role": "assistant"} | spoken, {"role": "tool", "content": '{"status":200,"body":null}'}]


def check_calls(calls: list):
    "Every call keeps the promises of its class, and can be stored."
    assert all(call.outcome in OUTCOMES for call in calls), calls
    assert all(call.arguments is None or isinstance(call.arguments, dict) for call in calls), calls
    assert all(call.name is None or isinstance(call.name, str) for call in calls), calls
    assert len({call.id for call in calls}) == len(calls), calls
    stored = json.dumps([call_to_json(call) for call in calls], allow_nan=False)
    assert [call_from_json(call) for call in json.loads(stored)] == calls, stored


def check(data: bytes):
    "Reads any bytes as a message and as a transcript; raises where a promise is broken."
    message = message_of(data)
    for truncated in (False, True):
        check_calls(parse_message(message, 3, truncated))
    assert parse_message(message, 3) == parse_message(message, 3)
    once = normalise(message, 3)
    assert normalise(once, 3) == once == json.loads(json.dumps(once, allow_nan=False)), once
    check_calls(build_trace(as_transcript(message)))


def main():
    "Fuzz until the limits given on the command line; the first argument is the folder."
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds()):
        (folder / f"seed-{number:03d}").write_bytes(seed)
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
