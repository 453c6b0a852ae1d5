import importlib


class Patch:
    def __init__(self, target):
        self.module_name, self.name = target.rsplit(".", 1)
        self.module = importlib.import_module(self.module_name)
        self.original = getattr(self.module, self.name)
        self.wrappers, self.patch_func, self.is_applied = [], None, False

    def apply_patch(self):
        if self.is_applied:
            return
        function = self.patch_func or self.original
        for wrapper in self.wrappers:
            function = wrapper(function)
        setattr(self.module, self.name, function)
        self.is_applied = True

    def remove_patch(self):
        setattr(self.module, self.name, self.original)
        self.patch_func, self.is_applied = None, False


class MindSpeedPatchesManager:
    patches_info = {}

    @classmethod
    def register_patch(cls, target, function):
        patch = cls.patches_info.setdefault(target, Patch(target))
        if function.__name__.endswith(("wrapper", "decorator")):
            patch.wrappers.append(function)
        else:
            patch.patch_func = function
        patch.is_applied = False

    @classmethod
    def apply_patches(cls):
        for patch in cls.patches_info.values():
            patch.apply_patch()
