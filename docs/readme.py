"README.md is the first page of the site: `jupyter-nbconvert --config docs/readme.py`"
import re
from nbconvert.preprocessors import Preprocessor

c.NbConvertApp.notebooks = ['nbs/index.ipynb']
c.NbConvertApp.export_format = 'markdown'
c.NbConvertApp.output_base = 'README'
c.NbConvertApp.output_files_dir = 'nbs/images'
c.NbConvertApp.log_level = 'WARN'
c.ExtractOutputPreprocessor.output_filename_template = 'curves{extension}' # the one picture
c.FilesWriter.build_directory = '.'
c.RegexRemovePreprocessor.enabled = True
c.RegexRemovePreprocessor.patterns = [r'#\| hide']

class NoDirectives(Preprocessor):
    "Leave out the lines of prose that say what is exported, and name the language of cells"
    def preprocess(self, nb, resources):
        nb.metadata['language_info'] = dict(name='python')
        return super().preprocess(nb, resources)

    def preprocess_cell(self, cell, resources, i):
        if cell.cell_type=='markdown': cell.source = re.sub(r'^#\| .*\n', '', cell.source)
        return cell,resources

c.MarkdownExporter.preprocessors = [NoDirectives]
