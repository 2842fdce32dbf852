#if __METAL_VERSION__ < 400
#error "tensors come with Metal 4.0"
#endif
