// openai-node's part of `make test-clients`: one JSON line a case, as openai_python.py prints them.
//     node openai_node.cjs BASE_URL MODEL
"use strict";
const { OpenAI } = require("openai");

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0, timeout: 300_000 });
const QUESTION = { role: "user", content: "Name three kinds of trees." };
const NEXT = { role: "user", content: "And three more?" };
const STORY = [{ role: "user", content: "Tell a very long story about a forest." }];
const common = { model, temperature: 0, max_tokens: 60 };
const create = (fields) => client.chat.completions.create({ ...common, ...fields });
const say = (name, told) => console.log(JSON.stringify({ case: name, ...told }));
const usageOf = (name, usage, more) =>
  say(name, {
    prompt: usage.prompt_tokens,
    completion: usage.completion_tokens,
    cached: usage.prompt_tokens_details?.cached_tokens ?? null,
    ...more,
  });

async function main() {
  const first = await create({ messages: [QUESTION] });
  usageOf("plain", first.usage);
  const reply = { role: "assistant", content: first.choices[0].message.content };
  usageOf("second", (await create({ messages: [QUESTION, reply, NEXT] })).usage);

  try {
    await create({ messages: [{ role: "user", content: "word ".repeat(9000) }] });
    say("over-length", { status: 200 });
  } catch (error) {
    say("over-length", { status: error.status, code: error.code });
  }

  let seen = 0;
  for await (const _ of await create({ messages: STORY, stream: true, max_tokens: 1000 })) {
    if (++seen === 4) break; // leaving the loop aborts the request
  }
  say("cancelled", {});

  const begun = performance.now();
  let firstAt = 0;
  let usage = null;
  const options = { stream: true, stream_options: { include_usage: true } };
  for await (const chunk of await create({ messages: STORY, ...options })) {
    if (chunk.choices[0]?.delta.content && !firstAt) firstAt = performance.now();
    usage = chunk.usage ?? usage;
  }
  const seconds = (performance.now() - firstAt) / 1000;
  const rate = (usage.completion_tokens - 1) / seconds;
  usageOf("streamed", usage, { ttft_ms: firstAt - begun, tokens_per_s: rate });
}

main();
