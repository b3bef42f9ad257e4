"""Sends one job to a Ray cluster: an object on stdin says which (see cluster.job_of). Run by the Python that has Ray, venv/'s."""

import json
import logging
import sys


def main():
    job = json.load(sys.stdin)
    from ray.job_submission import JobSubmissionClient

    logging.disable(logging.INFO)
    more = {"entrypoint_num_cpus": job["cores"]} if job["cores"] else {"entrypoint_num_gpus": 1}
    if job["not_on"]:
        more["entrypoint_label_selector"] = {"ray.io/node-id": f"!in({','.join(job['not_on'])})"}
    try:
        JobSubmissionClient(job["address"]).submit_job(
            entrypoint="exec python3 -m loop.remote.node",
            submission_id=job["id"],
            runtime_env={"working_dir": job["folder"], "env_vars": job["environment"]},
            metadata=job["metadata"],
            **more,
        )
    except Exception as e:  # whatever Ray raises: one line for whoever asked
        print(f"{type(e).__name__}: {' '.join(str(e).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
