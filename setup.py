from configparser import ConfigParser
from pathlib import Path
from setuptools import setup, find_packages

here = Path(__file__).parent
parser = ConfigParser()
parser.read(here/'settings.ini', encoding='utf-8')
cfg = parser['DEFAULT']
extras = {k:cfg[f'{k}_requirements'].split() for k in ('dev','docs','bench','ssh','slurm','ray')} # ssh: the system's own, so there is nothing to install
extras['dev'] += extras['docs']

setup(name=cfg['lib_name'], version=cfg['version'], description=cfg['description'], keywords=cfg['keywords'], author=cfg['author'],
    license_expression=cfg['license'], license_files=['LICENSE'], python_requires='>='+cfg['min_python'], packages=find_packages(include=[cfg['lib_path'], cfg['lib_path']+'.*']), package_data={cfg['lib_path']:['py.typed']},
    install_requires=cfg['requirements'].split(), extras_require=extras,
    long_description=(here/'README.md').read_text(encoding='utf-8'), long_description_content_type='text/markdown',
    entry_points=dict(nbdev=[f"{cfg['lib_path']}={cfg['lib_path']}._modidx:d"], console_scripts=['fastdist-check=fastdist.check:main']))
