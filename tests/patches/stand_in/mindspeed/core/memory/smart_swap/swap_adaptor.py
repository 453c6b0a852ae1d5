def train_step_wrapper(original):
    def train_step(*args, **kwargs):
        raise AssertionError("MindSpeed's own SmartSwap ran")

    return train_step
