"Run a script as the cells of a notebook, in a real kernel, and print what is to be seen under them: `python _kernel.py SCRIPT`"
import nbformat,os,re,sys
from nbclient import NotebookClient
from pathlib import Path

path = Path(sys.argv[1])
os.environ['PYTHONPATH'] = os.pathsep.join([str(path.parent), os.environ.get('PYTHONPATH', '')])
nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(o) for o in path.read_text().split('\n\n')])
client = NotebookClient(nb, timeout=50, kernel_name='python3', allow_errors=True)
client.execute()
for cell in nb.cells:
    for o in cell.get('outputs', []):
        if o.output_type=='error': print('\n'.join(o.traceback))
        elif o.output_type=='stream': print(o.text)
        elif '<table' in o.data.get('text/html', ''): print(re.sub(r'<[^>]+>', '', re.sub(r'</(tr|td|th)>', lambda m: '\n' if m[1]=='tr' else '  ', o.data['text/html'])))
        elif 'text/html' not in o.data: print(o.data.get('text/plain', ''))
