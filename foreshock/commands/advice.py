"""`foreshock advice`: what each lever advises, and what the trainer did with it."""

import argparse
import json

from foreshock.commands.command import Command, add_run_argument, add_service_options, connect
from foreshock.commands.queries import find_run
from foreshock.commands.text import wrap
from foreshock.json_values import json_value
from foreshock.learning_rate.advice import effect_in_words, lever_in_words
from foreshock.learning_rate.modes import BESIDE_THE_RATE


def configure(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser, required=False)
    parser.add_argument("--json", action="store_true", help="print the advice as JSON")
    add_service_options(parser)


def run(arguments: argparse.Namespace) -> int:
    with connect(arguments) as reader:
        found = reader.advice(find_run(reader, arguments.run).id)
    if arguments.json:
        print(json.dumps(json_value(found), indent=2, ensure_ascii=False, allow_nan=False))
        return 0
    advice, step = found.advice, found.advice.observed_step + 1
    sentences = [advice.why] if advice.why else []
    applied = effect_in_words(advice.mode, advice.revision, found.applied)
    sentences.append(f"rate ({advice.mode}): × {found.advised_scale:g}, {applied}. {advice.reason}")
    for name in BESIDE_THE_RATE:
        state = getattr(advice, name)
        sentences.append(f"{name} ({state.mode}): {lever_in_words(name, state, step, found.reported.get(name))}")
    print("\n".join(line for each in sentences for line in wrap(each, "  ", "")))
    return 0


command = Command("print what each lever advises: learning rate, correction of the loss, rollback", configure, run)
