// The node's API.

let token = null;

export const hasToken = () => token !== null;
export const setToken = (given) => { token = isToken(given) ? given : null; };

const isToken = (text) => /^[\x20-\x7e]+$/.test(text ?? "");

const sent = (path, options) =>
  fetch(`/api/v1/${path}`, options).catch(() => { throw new Error("this node does not answer"); });

async function answered(response) {
  const answer = await response.json().catch(() => ({ error: `status ${response.status}` }));
  if (!response.ok) throw Object.assign(new Error(answer.error ?? `status ${response.status}`), { status: response.status });
  return answer;
}

export async function get(path, query = {}) {
  const asked = new URLSearchParams(query).toString();
  const headers = token === null ? {} : { Authorization: `Bearer ${token}` };
  return answered(await sent(asked ? `${path}?${asked}` : path, { headers, signal: AbortSignal.timeout(15000) }));
}

// The token stays in this page's memory; a reload forgets it.
export async function act(path, body, given) {
  const bearer = given || token;
  if (bearer && !isToken(bearer)) throw new Error("an admin token has ASCII characters only: this is none");
  const authorization = bearer ? { Authorization: `Bearer ${bearer}` } : {}; // without one: a certificate may do
  const headers = { "Content-Type": "application/json", ...authorization };
  const response = await sent(path, { method: "POST", headers, body: JSON.stringify(body) });
  if (response.status === 401) token = null;
  const done = await answered(response);
  token = bearer;
  return done;
}
