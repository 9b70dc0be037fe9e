"""One layer on ordinary NCHW arrays: no network, no MPI.

    python docs/examples/lone_layer.py

The arrays in and out are plain NumPy in PyTorch's order; the conversion to the blocked layout that the kernels work on
is done inside. Inside a network it is done only once, at the input.
"""
import numpy as np

from pcldnn import Conv2d, CrossEntropyLoss, MaxPool2d

random = np.random.default_rng(0)
x = random.standard_normal((8, 3, 32, 32), dtype=np.float32)       # images, channels, height, width

conv = Conv2d(3, 20, kernel_size=5, stride=2, padding=2)
conv.initialize(seed=0)
y = conv.forward(x)
print("conv:", x.shape, "->", y.shape)

pool = MaxPool2d(2)
z = pool.forward(y)
print("pool:", y.shape, "->", z.shape)

# The backward pass is two calls, so that the gradient of the weights can be sent while input_grad still computes.
dz = random.standard_normal(z.shape, dtype=np.float32)
dy = pool.input_grad(dz)
gradients = conv.weight_grad(dy)
dx = conv.input_grad(dy)
print("gradients:", {name: gradient.shape for name, gradient in gradients.items()}, "and of x", dx.shape)

# Is it a gradient? A linear layer gives <dy, conv(x)> = <dx, x> when its bias is zero (as it starts).
left, right = np.vdot(dy, y).item(), np.vdot(dx, x).item()
print(f"<dy, y> = {left:.4f}, <dx, x> = {right:.4f}")
assert abs(left - right) < 1e-3 * np.linalg.norm(dy) * np.linalg.norm(y)

# Weights are read and set in logical order, whatever the block size of the kernels.
weight = conv.state_dict()["weight"]
print("weight:", weight.shape)
conv.load_state_dict({"weight": 2 * weight, "bias": np.ones(20, np.float32)})
assert np.allclose(conv.forward(x), 2 * y + 1, atol=1e-4)

loss = CrossEntropyLoss()
print("loss of a row:", loss.forward(np.array([[-30, 30]], np.float32), np.array([0])))
