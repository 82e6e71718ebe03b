// Calls of the server's own routes: with the reader's key, errors as one sentence, streams event by event.

const KEY = "halfbyte.key";

export const key = () => sessionStorage.getItem(KEY) ?? "";
export const keepKey = (value) => sessionStorage.setItem(KEY, value.trim());

export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** The answer to a request; Refused with what the server says when it is not a success, or when no answer comes. */
export async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (key()) headers.Authorization = `Bearer ${key()}`;
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The server does not answer.", 0);
  }
  if (answer.ok) return answer;
  let message = `The server answered ${answer.status}.`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // a proxy's page says less than the status
  }
  throw new Refused(message, answer.status);
}

/** The data of each event of a stream, parsed, up to [DONE]; Refused when an event is an error or the stream breaks off. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Refused("The answer broke off.", 0);
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const data = JSON.parse(line.slice(6));
      if (data.error) throw new Refused(data.error.message, data.error.code);
      yield data;
    }
  }
}
