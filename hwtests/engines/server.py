"""One llama.cpp server, until it is killed: python server.py MODEL.gguf PORT [CONTEXT]."""

import sys
import threading

import xllamacpp

parameters = xllamacpp.CommonParams()
parameters.model.path = sys.argv[1]
parameters.model_alias = {"m"}
parameters.hostnames = ["127.0.0.1"]
parameters.port = int(sys.argv[2])
parameters.n_parallel = 4
parameters.n_ctx = 4 * (int(sys.argv[3]) if len(sys.argv) > 3 else 2048)
parameters.cpuparams.n_threads = 1
parameters.cpuparams_batch.n_threads = 1
parameters.endpoint_metrics = True
server = xllamacpp.Server(parameters)
threading.Event().wait()
