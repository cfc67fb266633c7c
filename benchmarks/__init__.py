"""Benchmarks, to be run from the root of the repository:

python -m benchmarks input [--config=FILE | --models=mixer_s16 --workers=4 --workers=8]
python -m benchmarks dispatch --config=configs/quickstart.py
python -m benchmarks optimizers --config=configs/quickstart.py
python -m benchmarks costs --study=configs/studies/frontier.py --run='1x-cifar10-mini8-*-seed0'
python -m benchmarks updates --config=configs/quickstart.py [--steps=300] [--out=updates.png]
python -m benchmarks uses
python -m benchmarks precision
python -m benchmarks gauss_newton [--rounds=5]
python -m benchmarks other_models
python -m benchmarks train [--models=mixer_s16] [--optimizers=sgd,kfac] [--dtype=bfloat16]
python -m benchmarks compile [--models=mixer_b16,mixer_l16] [--optimizers=sgd,kfac]
python -m benchmarks configs [--configs=kfac_cifar10:s4 --configs=mlm] [--rounds=2]
python -m benchmarks inference [--models=mixer_b16,resmlp_s12] [--batch_size=32]
python -m benchmarks zoo [--models=mixer_b16,resmlp_s12] [--batch_size=32]
python -m benchmarks peers [--models=mixer_s16] [--profile=8] [--torch_python=PYTHON]
python -m benchmarks text_peers [--models=gmlp_text_small] [--max_length=128] [--torch_python=PYTHON]
python -m benchmarks translation_peers [--batch_size=32] [--max_length=32] [--torch_python=PYTHON]
python -m benchmarks operator_peers [--points=512 --points=2048] [--published=DIR] [--torch_python=PYTHON]
python -m benchmarks physics_peers [--problems=poisson] [--seconds=60] [--peers_python=PYTHON]
python -m benchmarks scaling [--models=mixer_b16,mixer_l16]
python -m benchmarks plans [--configs=kfac_cifar10:s4] [--devices=h100:8] [--out=FILE.csv]
python -m benchmarks plan_mixers [--models=mixer_b16] [--optimizers=kfac] [--devices=h100:32x8]
python -m benchmarks plan_truth [--configs=mlm]
python -m benchmarks device --minutes=10 [--out=device.json]

A command measures in one run a figure and the figure that it is compared with. Machines are
noisy: the candidates take turns, and medians are reported.
"""
