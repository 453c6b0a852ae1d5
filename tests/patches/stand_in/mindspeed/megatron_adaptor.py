"""At import, like the real one: parse the flags it knows, apply patches, and wrap Megatron's arguments."""
import argparse
import functools

import megatron.training.arguments as arguments
import megatron.training.training  # noqa: F401

from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager

parser = argparse.ArgumentParser(allow_abbrev=False)
MindSpeedFeaturesManager.register_features_args(parser)
mindspeed_args, _ = parser.parse_known_args()
MindSpeedFeaturesManager.apply_features_patches(mindspeed_args)


def parse_args_wrapper(parse_args):
    @functools.wraps(parse_args)
    def wrapper(extra_args_provider=None, ignore_unknown_args=False):
        def provider(parser):
            parser = extra_args_provider(parser) if extra_args_provider else parser
            MindSpeedFeaturesManager.register_features_args(parser)
            return parser

        return parse_args(provider, ignore_unknown_args)

    return wrapper


arguments.parse_args = parse_args_wrapper(arguments.parse_args)
