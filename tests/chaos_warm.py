"""What every life imports, once, in the server that they are forked from: a process with no threads and no Ray of its own."""

import termrsi.actors.cluster
import termrsi.driver
import termrsi.model.checkpoint
import termrsi.pipeline  # noqa: F401
