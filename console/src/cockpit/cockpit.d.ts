// What this console uses of Cockpit's library, base1/cockpit.js, which Cockpit provides (doc/guide, "cockpit.js API"). It is not a part
// of the console, and it defines the global `cockpit`.

/** Why a channel or a request ended, such as "access-denied", "not-found", "terminated", "disconnected". */
export interface Ended {
  problem?: string | null;
}

export interface Channel {
  send(data: Uint8Array): void;
  close(): void;
  addEventListener(type: "message", listener: (event: Event, data: Uint8Array) => void): void;
  addEventListener(type: "close", listener: (event: Event, options: Ended) => void): void;
}

/** A request that was refused has the status; one that did not reach its server has a problem. */
export interface Failure extends Ended {
  status?: number | null;
}

export interface Sent {
  /** Called once, when the head of the response has come. */
  response(callback: (status: number, headers: Record<string, string>) => void): Sent;
  /** Called with each part of a body, if the status is 2xx. */
  stream(callback: (data: Uint8Array) => void): Sent;
  /** This promise is Cockpit's own: a failure has a second value, the body. */
  then(done: (data: Uint8Array) => void, failed: (failure: Failure, data?: Uint8Array) => void): unknown;
  close(problem: string): void;
}

export interface Client {
  request(options: {
    method: string;
    path: string;
    body: Uint8Array | "";
    headers: Record<string, string>;
  }): Sent;
}

/** "try": as root if the user of Cockpit has administrative access, and else as the user. */
export type Superuser = "try";

export interface Cockpit {
  http(socket: string, options: { superuser: Superuser; binary: true }): Client;
  channel(
    options: { payload: "null" } | { payload: "stream"; unix: string; superuser: Superuser; binary: true },
  ): Channel;
  transport: {
    wait(callback: () => void): void;
    /** The host whose bridge channels lead to. */
    host: string | null;
    csrf_token: string;
    /** Address of Cockpit's WebSocket, whose path leads to other things of the session. */
    uri(suffix: string): string;
  };
  /** Manifests of the packages of the host, with what an administrator has overridden. */
  manifests: Record<string, unknown>;
}
