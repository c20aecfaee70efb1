"""Print every metric of an engine by its kind."""

import sys

from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Vector


def main() -> None:
    llm = LLM(model=sys.argv[1], disable_log_stats=False)
    outputs = llm.generate(["12+34=", "7+8="], SamplingParams(temperature=0, max_tokens=8))
    for output in outputs:
        print(output.prompt, output.outputs[0].text)
    for metric in llm.get_metrics():
        if isinstance(metric, Gauge):
            print(f"gauge {metric.name} {metric.value}")
        elif isinstance(metric, Counter):
            print(f"counter {metric.name} {metric.value} {sorted(metric.labels)}")
        elif isinstance(metric, Vector):
            print(f"vector {metric.name} {metric.values}")
        elif isinstance(metric, Histogram):
            assert metric.buckets["+Inf"] == metric.count
            print(f"histogram {metric.name} {metric.count} {metric.sum >= 0}")


if __name__ == "__main__":
    main()
