// What the check of an image has found, with what to do about it.
import type { ImageCheck, Schemas } from "../api/client.ts";
import { Badge, Notice, type Tone } from "./parts.tsx";

const TONE: Record<Schemas["Severity"], Tone> = { error: "critical", warning: "warning", note: "note" };
const ORDER: Schemas["Severity"][] = ["error", "warning", "note"];

export function Findings({ check }: { check: ImageCheck }) {
  const hasRoot = check.volumes.some((v) => v.role === "root");
  const findings = [...check.findings].sort((a, b) => ORDER.indexOf(a.severity) - ORDER.indexOf(b.severity));
  return (
    <>
      {hasRoot ? null : (
        <Notice>No file system with a system was recognised, so little of the image could be checked.</Notice>
      )}
      {findings.length === 0 && hasRoot ? (
        <Notice tone="good">The check has found nothing that breaks clones.</Notice>
      ) : null}
      <ul class="findings">
        {findings.map((f) => (
          <li key={`${f.kind}/${f.path}`}>
            <Badge tone={TONE[f.severity]}>{f.severity}</Badge>
            <div>
              <strong>{f.what}</strong> <code>{f.path}</code>
              <p>{f.why}</p>
              <p class="remedy">{f.remedy}</p>
            </div>
          </li>
        ))}
      </ul>
    </>
  );
}
