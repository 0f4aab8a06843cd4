// How the console reaches the daemon: requests, the event stream and sockets. Owns nothing of their meaning.
//
// One transport stands for the whole page: this one, or that of a page inside Cockpit (src/cockpit). So no other file calls fetch,
// EventSource or WebSocket. Invariant: every address has the same origin as the page.

export interface Reply {
  status: number;
  etag: string | null;
  /** Parsed JSON; undefined if there is none. */
  body: unknown;
}

export interface Request {
  method: "GET" | "POST" | "PUT" | "DELETE";
  /** Path with its query, such as `/v1/machines?limit=10`. */
  path: string;
  body?: unknown;
  headers?: Record<string, string>;
  signal?: AbortSignal | undefined;
}

export interface Stream {
  close(): void;
}

export interface StreamCallbacks {
  opened(): void;
  message(data: string): void;
  /** The stream is interrupted, and is opened again by itself behind the last message. */
  interrupted(): void;
  /** The stream has ended, and does not come back by itself. */
  failed(): void;
}

/** A request did not reach the daemon. The message is a sentence that says what to do. */
export class NoConnection extends Error {
  override name = "NoConnection";
}

/** What to do about a request that did not reach the daemon, if that is known. */
export function adviceOf(error: unknown): string | null {
  // By its name: a transport of another script has a class of its own.
  return error instanceof Error && error.name === "NoConnection" ? error.message : null;
}

export interface Transport {
  request(request: Request): Promise<Reply>;
  stream(path: string, callbacks: StreamCallbacks): Stream;
  /** Opens a WebSocket at a path of the API. */
  socket(path: string, protocols?: string[]): WebSocket;
  /** Address at which the browser itself loads a document of the API. */
  document(path: string): string;
}

/**
 * Where a path of the API is: beside the folder of the page. `spillway console` has all of it below a folder that nobody else
 * knows.
 */
function addressOf(path: string): string {
  return new URL(`..${path}`, document.baseURI).href;
}

/** The page was loaded from the daemon, or from `spillway console`. */
export class HttpTransport implements Transport {
  async request({ method, path, body, headers, signal }: Request): Promise<Reply> {
    const init: RequestInit = {
      method,
      headers: {
        Accept: "application/json",
        ...(body === undefined ? {} : { "Content-Type": "application/json" }),
        ...headers,
      },
      credentials: "same-origin",
      // The console sends If-None-Match itself, and wants to see the 304.
      cache: "no-store",
      ...(body === undefined ? {} : { body: JSON.stringify(body) }),
      ...(signal ? { signal } : {}),
    };
    const response = await fetch(addressOf(path), init).catch((error) => {
      // Only `spillway console` is without TLS: a new one has another address.
      if (signal?.aborted || location.protocol === "https:") throw error;
      throw new NoConnection(
        "'spillway console' has ended, or cannot be reached: run it again, and open its new address.",
      );
    });
    const text = response.status === 304 ? "" : await response.text();
    return { status: response.status, etag: response.headers.get("ETag"), body: parse(text) };
  }

  stream(path: string, callbacks: StreamCallbacks): Stream {
    // Without TLS browsers speak HTTP/1.1, with six connections to a host for all of their tabs: a seventh tab would wait for ever.
    // WebSockets are none of these.
    if (location.protocol !== "https:") return this.#socketStream(path, callbacks);
    const source = new EventSource(addressOf(path));
    source.onopen = () => callbacks.opened();
    source.onmessage = (event) => callbacks.message(String(event.data));
    source.onerror = () => {
      // An EventSource that was closed by the browser never tries again; any other does.
      if (source.readyState === EventSource.CLOSED) callbacks.failed();
      else callbacks.interrupted();
    };
    return { close: () => source.close() };
  }

  #socketStream(path: string, callbacks: StreamCallbacks): Stream {
    const socket = this.socket(path);
    socket.onopen = () => callbacks.opened();
    socket.onmessage = ({ data }) => callbacks.message(String(data));
    socket.onclose = () => callbacks.failed();
    return {
      close: () => {
        socket.onclose = null;
        socket.close();
      },
    };
  }

  socket(path: string, protocols?: string[]): WebSocket {
    const url = new URL(addressOf(path));
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    const socket = new WebSocket(url, protocols);
    socket.binaryType = "arraybuffer";
    return socket;
  }

  document(path: string): string {
    return addressOf(path);
  }
}

/** A body as JSON; undefined if it is none. */
export function parse(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

/** In Cockpit, a script before the console's has set it. */
const given = (globalThis as { spillwayTransport?: Transport }).spillwayTransport;
export const transport: Transport = given ?? new HttpTransport();
