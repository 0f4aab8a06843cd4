// Reads a stream of server-sent events (HTML standard, section 9.2.6) as its bytes come, however they are divided. Owns no connection.
//
// Invariant: what waits for the end of its event is bounded.

export interface StreamEvent {
  data: string;
  /** The last id that was sent, also with an earlier event. */
  id: string;
}

/** Most characters of an event. The daemon sends less. */
export const MAX_EVENT_CHARACTERS = 1 << 20;

export class EventReader {
  readonly #decoder = new TextDecoder();
  #line = "";
  /** The last character was a carriage return, whose line feed may follow. */
  #isAfterReturn = false;
  #data: string[] = [];
  #length = 0;
  #type = "";
  #id: string;

  constructor(id = "") {
    this.#id = id;
  }

  /** Events that are complete with these bytes. Those that have a type of their own are left out, as EventSource does. */
  take(bytes: Uint8Array): StreamEvent[] {
    const events: StreamEvent[] = [];
    let text = this.#decoder.decode(bytes, { stream: true });
    if (text === "") return events;
    if (this.#isAfterReturn && text.startsWith("\n")) text = text.slice(1);
    this.#isAfterReturn = text.endsWith("\r");
    const lines = text.split(/\r\n|\r|\n/);
    lines[0] = this.#line + lines[0];
    this.#line = lines.pop() ?? "";
    for (const line of lines) {
      const event = this.#end(line);
      if (event) events.push(event);
    }
    if (this.#line.length + this.#length > MAX_EVENT_CHARACTERS) throw new Error("an event is too long");
    return events;
  }

  #end(line: string): StreamEvent | null {
    if (line === "") {
      const isMessage = this.#data.length > 0 && (this.#type === "" || this.#type === "message");
      const event = { data: this.#data.join("\n"), id: this.#id };
      this.#data = [];
      this.#length = 0;
      this.#type = "";
      return isMessage ? event : null;
    }
    const colon = line.indexOf(":");
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (field === "data") {
      this.#data.push(value);
      this.#length += value.length + 1;
    } else if (field === "event") this.#type = value;
    else if (field === "id" && !value.includes("\0")) this.#id = value;
    return null;
  }
}
