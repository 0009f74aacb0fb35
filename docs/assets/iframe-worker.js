// The site's search from a file: there browsers start no workers, so what a worker would run runs in a hidden frame.
"use strict";
(() => {
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.document.open();
      inside.document.write(`<html><body><script>postMessage = data => parent.postMessage(data, "*")</script>
        <script src="${url}"></script></body></html>`);
      inside.document.close();
      this.loaded = new Promise((done) => inside.addEventListener("load", done));
      addEventListener("message", ({ source, data }) => {
        if (source === this.frame.contentWindow) this.dispatchEvent(new MessageEvent("message", { data }));
      });
    }
    postMessage(data) {
      this.loaded.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  }
  window.IFrameWorker = IFrameWorker; // the site's search asks for this name
  if (location.protocol === "file:") window.Worker = IFrameWorker;
})();
