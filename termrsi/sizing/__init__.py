"""How much memory and time a run will take, before anything starts: arithmetic without torch, Ray or a GPU.

`shapes` counts a model's parameters, `memory` the bytes of each role, `layout` lays roles out on the nodes of `conf/cluster`,
`rates` tells seconds from hardware figures that are assumed, `simulation` plays the loop, `work` counts what stages do.
"""
