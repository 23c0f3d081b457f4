"The package's metadata is in settings.ini; this only hands it to setuptools."
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

settings = ConfigParser(delimiters=["="])
settings.read("settings.ini", encoding="utf-8")
package = settings["DEFAULT"]
extras = ("train", "serve", "record", "mcp", "clients", "contract", "fuzz", "endpoints", "scaffolds", "pretrained", "test")
train, serve, record, mcp, clients, contract, fuzz, endpoints, scaffolds, pretrained, test = (
    package[f"{extra}_requirements"].split() for extra in extras)

setup(
    name=package["lib_name"],
    version=package["version"],
    description=package["description"],
    author=package["author"],
    license=package["license"],
    long_description=Path("README.md").read_text(encoding="utf-8") if Path("README.md").exists() else "",
    long_description_content_type="text/markdown",
    python_requires=">=" + package["min_python"],
    packages=find_packages(include=[package["lib_path"] + "*"]),
    package_data={package["lib_path"]: ["data/*", "data/*/*"]},
    install_requires=package["requirements"].split(),
    extras_require={"train": train, "serve": serve, "record": record, "mcp": mcp, "clients": clients, "contract": contract,
                    "fuzz": fuzz, "endpoints": endpoints, "scaffolds": scaffolds,
                    "pretrained": pretrained,
                    "test": train + serve + record + mcp + clients + contract + endpoints + scaffolds + pretrained + test},
    entry_points={
        "console_scripts": [f"{package['lib_name']}={package['lib_path']}.cli:main"],
        "nbdev": [f"{package['lib_path']}={package['lib_path']}._modidx:d"],
        # the second name is the same folder seen from nbs/
        "papermill.io": [f"{place}results/={package['lib_path']}.runs:results_handler" for place in ("", "../")],
    },
)
