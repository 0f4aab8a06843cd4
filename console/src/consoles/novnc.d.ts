// What this console uses of noVNC, which has no types of its own.
declare module "@novnc/novnc" {
  export default class RFB extends EventTarget {
    constructor(target: HTMLElement, socket: WebSocket);
    scaleViewport: boolean;
    background: string;
    focus(): void;
    sendCtrlAltDel(): void;
  }
}
