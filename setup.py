import re
from configparser import ConfigParser
from pathlib import Path
from setuptools import setup, find_packages

here = Path(__file__).parent
parser = ConfigParser()
parser.read(here/'settings.ini', encoding='utf-8')
cfg = parser['DEFAULT']
extras = {k:cfg[f'{k}_requirements'].split() for k in ('dev','docs','bench','ssh','slurm','ray')} # ssh: the system's own, so there is nothing to install
extras['dev'] += extras['docs']

def for_pypi(text, repo):
    "Return the README for a page with none of its files beside it: links and pictures lead to `repo`, or are words while it has no address"
    def link(m): return f'[{m[1]}]({repo}/blob/main/{m[2]})' if repo else m[1]
    def picture(m): return f'<img src="{repo}/raw/main/{m[1]}"{m[2]}>' if repo else re.search('alt="(.*?)"', m[2])[1]
    text = re.sub(r'!\[\w*\]\((?!https:)(\S+?)\)', r'<img src="\1" alt="">', text)
    text = re.sub(r'<img src="(?!https:)(.+?)"(.*?)>', picture, text)
    return re.sub(r'\[([^\]]+)\]\((?!https:|#)(\S+?)\)', link, text)

setup(name=cfg['lib_name'], version=cfg['version'], description=cfg['description'], keywords=cfg['keywords'], author=cfg['author'],
    license_expression=cfg['license'], license_files=['LICENSE'], python_requires='>='+cfg['min_python'], packages=find_packages(include=[cfg['lib_path'], cfg['lib_path']+'.*']), package_data={cfg['lib_path']:['py.typed']},
    install_requires=cfg['requirements'].split(), extras_require=extras,
    long_description=for_pypi((here/'README.md').read_text(encoding='utf-8'), cfg['git_url']), url=cfg['git_url'] or None, long_description_content_type='text/markdown',
    entry_points=dict(nbdev=[f"{cfg['lib_path']}={cfg['lib_path']}._modidx:d"], console_scripts=['fastdist-check=fastdist.check:main']))
