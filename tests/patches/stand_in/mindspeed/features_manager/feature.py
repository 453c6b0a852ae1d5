class MindSpeedFeature:
    def __init__(self, name, level=2):
        self.feature_name, self.optimization_level = name.replace("-", "_"), level

    def is_need_apply(self, args):
        return self.optimization_level <= args.optimization_level and bool(getattr(args, self.feature_name, None))

    def register_args(self, parser):
        pass

    def pre_validate_args(self, args):
        pass

    def validate_args(self, args):
        pass

    def post_validate_args(self, args):
        pass

    def pre_register_patches(self, patch_manager, args):
        pass

    def register_patches(self, patch_manager, args):
        pass
