// The API's own description in Swagger UI. The description needs the key, this page does not.

import { call, keepKey, key } from "./stream.js";

const form = document.getElementById("key-form");

function withKey(request) {
  if (key() && !request.headers.Authorization) request.headers.Authorization = `Bearer ${key()}`;
  return request;
}

async function load() {
  try {
    const spec = await (await call("openapi.json")).json();
    form.hidden = true;
    SwaggerUIBundle({ spec, dom_id: "#api", requestInterceptor: withKey, validatorUrl: null });
  } catch (error) {
    document.getElementById("notice").textContent = error.message;
    form.hidden = false;
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey(document.getElementById("key").value);
  load();
});
load();
