from mindspeed.features_manager.feature import MindSpeedFeature
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager
from mindspeed.features_manager.memory.smart_swap import SmartSwapFeature
from mindspeed.features_manager.optimizer.virtual_optimizer import VirtualOptimizerFeature


class OtherFeature(MindSpeedFeature):
    """One that we have nothing to do with."""

    def __init__(self):
        super().__init__("other-thing", 0)

    def register_args(self, parser):
        parser.add_argument("--other-thing", action="store_true", default=True)
        parser.add_argument("--optimization-level", type=int, default=2)

    def register_patches(self, patch_manager, args):
        def other_wrapper(original):
            def train_step(*arguments, **settings):
                return original(*arguments, **settings)

            return train_step

        patch_manager.register_patch("megatron.training.training.train_step", other_wrapper)


FEATURES_LIST = [VirtualOptimizerFeature()]  # of the older adaptor
MindSpeedFeaturesManager.set_features_list([OtherFeature(), VirtualOptimizerFeature(), SmartSwapFeature()])
