// Numbers and times for people.

const NUMBERS = new Intl.NumberFormat("en");

export const formatCount = (number) => (number === null || number === undefined ? "–" : NUMBERS.format(number));

export function lag(group) {
  const unknown = group.unknown_lag_streams;
  return unknown ? `${formatCount(group.known_lag)} + ?` : formatCount(group.lag);
}

export function lagTitle(group) {
  const unknown = group.unknown_lag_streams;
  return unknown ? `${formatCount(group.known_lag)}, and unknown on ${unknown} streams` : `${formatCount(group.lag)} messages`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 120) return `${Math.round(value)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  if (value < 172800) return `${Math.round(value / 3600)} h`;
  return `${Math.round(value / 86400)} days`;
}

export const clock = (at) => new Date(at).toLocaleTimeString("en-GB");

export const owner = (line) => line.session || shortAgent(line.agent);

// What would turn a text round, or not be seen in it, is shown as an escape, and so is every blank but a single plain one: a name
// must not look like another.
export const visible = (text) => String(text).replace(/(?! )[\p{Cc}\p{Cf}\p{Default_Ignorable_Code_Point}\p{Z}\u2800]|(?<= ) /gu,
  (character) => `\\u{${character.codePointAt(0).toString(16)}}`);

// HOST:PROCESS:RANDOM is long; all of it is in titles and tables.
export const shortAgent = (agent) => (agent ? agent.split(":").slice(0, 2).join(":") : null);
