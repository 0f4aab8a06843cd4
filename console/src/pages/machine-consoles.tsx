// The serial console and the screen of a machine. Both are files of their own: `serial.html` is a document in a frame, as its
// terminal needs another policy, and `screen.js` is a module with `connect(box, path, say)`.
//
// Invariant: a console is only loaded when its tab is opened, and its connection ends with the tab.
import { useEffect, useRef, useState } from "preact/hooks";
import type { Machine } from "../api/client.ts";
import { can } from "../state/session.ts";
import { Notice } from "../ui/parts.tsx";

/** What `screen.js` exports. */
interface ScreenModule {
  /** Shows the screen at a path of the API in a box. `say` gets what people should know, such as that the machine has ended. */
  connect(box: HTMLElement, path: string, say: (text: string) => void): { close(): void };
}

/** How a machine's screen can be seen. */
export function displayOf(machine: Machine): "none" | "vnc" {
  // Daemons say it from the version on that has screens.
  return (machine.status.run as { display?: "none" | "vnc" } | null | undefined)?.display ?? "none";
}

const NO_ROLE = "The keyboard and the screen of a machine need the role operate.";

export function SerialTab({ name }: { name: string }) {
  if (!can("operate")) return <Notice>{NO_ROLE}</Notice>;
  const address = `serial.html#/machines/${encodeURIComponent(name)}`;
  return (
    <>
      <iframe class="frame" title={`Serial console of ${name}`} src={address} />
      <p class="hint">
        <a href={address} target="_blank" rel="noopener">
          Open it in a window of its own
        </a>
      </p>
    </>
  );
}

export function ScreenTab({ name }: { name: string }) {
  const box = useRef<HTMLDivElement>(null);
  const [said, setSaid] = useState<string | null>(null);
  const isAllowed = can("operate");
  useEffect(() => {
    let isOver = false;
    let connection: { close(): void } | undefined;
    const module = new URL("screen.js", document.baseURI).href;
    if (isAllowed) {
      import(module).then(
        (screen: ScreenModule) => {
          if (!isOver && box.current) {
            connection = screen.connect(
              box.current,
              `/v1/machines/${encodeURIComponent(name)}/screen`,
              setSaid,
            );
          }
        },
        () => setSaid("The file screen.js could not be loaded."),
      );
    }
    return () => {
      isOver = true;
      connection?.close();
    };
  }, [name, isAllowed]);
  if (!isAllowed) return <Notice>{NO_ROLE}</Notice>;
  return (
    <>
      {said ? <Notice tone="warning">{said}</Notice> : null}
      <div class="frame" ref={box} />
    </>
  );
}
