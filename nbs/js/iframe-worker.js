// Search runs in a worker, and browsers refuse workers to pages that are opened from a folder: there its script runs in a hidden frame instead
if (location.protocol=='file:') window.Worker = class extends EventTarget {
  constructor(url) {
    super()
    const frame = document.body.appendChild(document.createElement('iframe'))
    frame.hidden = true
    this.frame = frame
    this.scope = frame.contentWindow
    this.scope.importScripts = (...urls) => Promise.all(urls.map(o => this.load(o)))
    this.scope.postMessage = data => this.dispatchEvent(new MessageEvent('message', {data}))
    this.ready = this.load(url)
  }
  load(url) {
    return new Promise((resolve, reject) => {
      const script = this.scope.document.createElement('script')
      Object.assign(script, {src:new URL(url, location.href).href, onload:resolve, onerror:reject})
      this.scope.document.body.appendChild(script)
    })
  }
  postMessage(data) { this.ready.then(() => this.scope.dispatchEvent(new MessageEvent('message', {data}))) }
  terminate() { this.frame.remove() }
}
