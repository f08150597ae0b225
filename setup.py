"""Build the distribution `synchronized-batchnorm`, which is imported as `sync_batchnorm`."""

import os
import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
# Read, not imported: a build has no torch.
VERSION = re.findall(r'^__version__ = "(.+)"$', (HERE / "sync_batchnorm/__init__.py").read_text(), re.MULTILINE)[0]


# The repository on GitHub whose workflow builds this release, as "owner/name"; None elsewhere.
REPOSITORY = os.environ.get("GITHUB_REPOSITORY")


def project_urls() -> dict[str, str]:
    """Return the links of the package index: to the repository that builds this release, or none."""
    if not REPOSITORY:
        return {}
    owner, _, name = REPOSITORY.partition("/")
    repository = f"https://github.com/{REPOSITORY}"
    return {
        "Source": repository,
        "Documentation": f"https://{owner}.github.io/{name}/",  # where `.github/workflows/site.yml` publishes the site
        "Changelog": f"{repository}/blob/v{VERSION}/docs/changelog.md",
        "Issues": f"{repository}/issues",
    }


# What a link of the README leads to, if it is no file of the repository.
PLACES = {"docs/contributing.md#the-site": "Documentation", "../../issues": "Issues"}


def without_relative_links(page: str) -> str:
    """Return a page for the package index, where relative links lead nowhere.

    They become links to the repository that builds this release. Built elsewhere, they become plain text.
    """

    def replacement(link: re.Match[str]) -> str:
        image, text, path = link.groups()
        if REPOSITORY and path in PLACES:
            return f"[{text}]({project_urls()[PLACES[path]]})"
        if REPOSITORY:
            kind = "raw" if image else "blob"
            path = f"README.md{path}" if path.startswith("#") else path
            return f"{image}[{text}](https://github.com/{REPOSITORY}/{kind}/v{VERSION}/{path})"
        return "" if image else text

    return re.sub(r"(!?)\[([^]]*)\]\((?!https?:)([^)]*)\)", replacement, page)


FOLDERS = sorted(path.parent.name for path in HERE.glob("sync_batchnorm/*/__init__.py"))

# Pinned: one torch for everybody who runs examples and tests, and the torchvision that belongs to it.
EXAMPLES = [
    "torch==2.13.0",
    "torchvision==0.28.0",
    "scikit-learn==1.9.1",
    "matplotlib==3.11.2",
    "tqdm==4.70.1",
]

setup(
    name="synchronized-batchnorm",
    version=VERSION,
    description="Synchronized batch norm for torch.nn.DataParallel: N devices train to the same numbers as one",
    long_description=without_relative_links((HERE / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
    project_urls=project_urls(),
    license_expression="MIT",
    license_files=["LICENSE"],
    keywords=["pytorch", "batch-normalization", "data-parallel", "multi-gpu"],
    packages=["sync_batchnorm", *(f"sync_batchnorm.{folder}" for folder in FOLDERS)],
    package_data={"sync_batchnorm": ["LICENSE", "py.typed"]},
    python_requires=">=3.11",
    # The lower bound is the oldest torch that the whole test suite has passed on.
    install_requires=["torch>=2.8.0"],
    extras_require={
        "examples": EXAMPLES,
        "frameworks": [  # those that docs/frameworks.md is about
            *EXAMPLES,
            "transformers==5.23.0",
            "accelerate==1.15.0",
            "fastai==2.8.12",
            "skorch==1.4.0",
            "pytorch-ignite==0.5.5",
            "monai==1.6.1",
            "segmentation_models_pytorch==0.6.0",
            "ultralytics==8.4.190",
            "pytorch-metric-learning==2.9.0",
            "lightning==2.6.6",
            "timm==1.0.31",
            "nbclient==0.11.0",  # which runs the notebook
            "ipykernel==7.4.0",
            "torchinfo==1.8.0",  # and what a summary, an attribution and a check of privacy say of a wrapper
            "captum==0.9.0",
            "opacus==1.6.0",
            "thop==0.1.1.post2209072238",
            "ptflops==0.7.5",
        ],
        "test": [
            *EXAMPLES,
            "timm==1.0.31",
            "pytest==9.2.0",
            "pytest-timeout==2.4.0",
            "pytest-xdist==3.8.0",
            "onnx==1.23.2",
            "onnxscript==0.7.2",
            "ruff==0.17.5",
            "mypy==2.4.1",
            "setuptools==84.2.1",
        ],
    },
    classifiers=[
        "Development Status :: 4 - Beta",  # until it has run on a real GPU
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",  # what was run; README.md says what was not
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    zip_safe=False,
)
