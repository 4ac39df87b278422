"""What is installed: name, packages, data files, the `tarsus` command and what it needs.

Stands here and not in pyproject.toml because colcon under the setuptools of current ROS 2 distributions installs
nothing from pyproject-only metadata, and says so nowhere.
"""

from setuptools import setup

# What a robot's computer needs. Ranges, because there the system brings numpy and YAML, and ROS 2's messages use them.
CORE = [
    "numpy>=1.26,<3",  # 1.26 is what ROS 2 Jazzy's own packages are built against
    "onnxruntime>=1.20,<2",  # runs policy files; any 1.x reads the operators we export
    "rosbags>=0.11.9,<0.12",  # reads and writes rosbag2; its MCAP writer and damaged-file errors differ before
    "mcap>=1.6,<2",  # reads damaged MCAP files record by record
    "zstandard>=0.22,<1",  # rosbag2 files compressed as a whole
    "PyYAML>=6,<7",  # rosbag2 metadata
    "tyro>=1.0.17,<2",  # makes the command line from dataclasses and their docstrings
    "rich>=13.7,<15",  # tables and progress bars; viser needs it below 15
    "packaging>=23",  # `tarsus doctor` compares versions
]

# Physics. Exact: results are promised bit for bit, and mujoco.batch is new in 4.0.
SIM = ["mujoco==4.0.0"]

# Learning and export. Exact where a change would alter weights or the exported graph.
TRAIN = [
    *SIM,
    "torch==2.13.0",  # install a CPU build first (`make setup` does): PyPI's Linux build brings gigabytes of CUDA
    "rsl-rl-lib==5.5.1",  # PPO; we build its algorithm from its own classes, whose signatures change between minors
    "tensordict>=0.15,<0.16",  # what rsl_rl passes observations in
    "tensorboard>=2.21,<3",  # curves
    "onnx>=1.23,<2",  # checks the graph that torch writes and puts the contract into it
]

# Pictures, videos and report pages.
REPORT = [
    "matplotlib>=3.9,<4",  # plots
    "imageio-ffmpeg>=0.6,<1",  # MP4 with an ffmpeg of its own, so that none need be installed
]

# The live 3-D view in a browser.
VIEW = [
    "viser>=1.1,<2",
    "trimesh>=4,<6",  # the shapes it shows
]

# Kinematics and dynamics beside MuJoCo's. Exact: compared with MuJoCo to 1e-6 in the tests.
PINOCCHIO = ["pin==4.1.0"]

# ROS 2 Kilted from wheels, for machines without a ROS 2 installation. The wheels exist for x86-64 only.
ROS = [
    f"{name}; platform_machine == 'x86_64' and sys_platform == 'linux'"
    for name in ("ros-rclpy==9.1.2", "ros-rmw-fastrtps-cpp==9.3.3", "ros-sensor-msgs==5.5.1", "ros-std-srvs==5.5.1")
]

TEST = [
    "pytest>=9,<10",
    "pytest-xdist>=3.8,<4",  # both cores
    "hypothesis>=6.100,<7",  # damaged logs and odd shapes no one thinks of
]

DEV = [
    *TEST,
    "ruff==0.17.6",  # exact: another release formats and complains differently
    "mypy==2.4.1",  # the same
    "types-PyYAML>=6",
    "pre-commit>=4,<5",
    "gymnasium>=1.2,<2",  # what the throughput benchmark compares with
]

setup(
    name="tarsus",
    version="0.1.0",
    description="Sim-to-real control for robots: learn in simulation, carry one policy file over, read robot logs",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=["robots", "robots.unitree_h1_2", "logs", "sim", "sim.tasks", "policies"],
    py_modules=["tarsus", "tarsus_doctor"],
    package_data={"robots.unitree_h1_2": ["*.xml"], "policies": ["*.onnx", "*/*.onnx"]},
    data_files=[
        ("share/ament_index/resource_index/packages", ["resource/tarsus"]),
        ("share/tarsus", ["package.xml"]),
    ],
    entry_points={"console_scripts": ["tarsus = tarsus:main"]},
    install_requires=CORE,
    extras_require={
        "sim": SIM,
        "train": TRAIN,
        "report": REPORT,
        "view": VIEW,
        "pinocchio": PINOCCHIO,
        "ros": ROS,
        "all": [*TRAIN, *REPORT, *VIEW, *PINOCCHIO],  # not ros: its wheels restart every Python of the environment
        "test": TEST,  # colcon runs pytest only for a package with an extra of this name
        "dev": DEV,
    },
    zip_safe=False,
)
