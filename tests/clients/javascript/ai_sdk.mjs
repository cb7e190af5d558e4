// Vercel's AI SDK over the provider that is named: openai, openai-compatible or anthropic.

import {
  again, cityQuestion, endless, hello, key, load, model as name, refused, run, told, v1, weather,
  weatherQuestion,
} from "./features.mjs";

const provider = process.env.PROVIDER;
const { generateText, streamText, generateObject, Output, tool, stepCountIs, isStepCount } =
  await load("ai");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { createAnthropic } = await load("@ai-sdk/anthropic");
const { z } = await load("zod");

const made = {
  openai: () => createOpenAI({ baseURL: v1, apiKey: key }),
  compatible: () =>
    createOpenAICompatible({
      name: "fabric", baseURL: v1, apiKey: key, supportsStructuredOutputs: true,
    }),
  anthropic: () => createAnthropic({ baseURL: v1, apiKey: key }),
}[provider]();
const model = made(name);
const tools = {
  weather: tool({
    description: "Tell the weather.",
    inputSchema: z.object({ city: z.string() }),
    execute: async (input) => weather(input),
  }),
};
const schema = z.object({ city: z.string(), people: z.number().int() });
const stopWhen = (isStepCount ?? stepCountIs)(4);

async function collected(stream) {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return parts;
}

await run({
  async plain() {
    return (await generateText({ model, prompt: hello })).text;
  },
  streamed: () => collected(streamText({ model, prompt: hello }).textStream),
  async reasoning() {
    return (await generateText({ model, prompt: hello })).reasoningText;
  },
  async tool() {
    return (await generateText({ model, tools, stopWhen, prompt: weatherQuestion })).text;
  },
  async tool_streamed() {
    const parts = await collected(
      streamText({ model, tools, stopWhen, prompt: weatherQuestion }).textStream,
    );
    return parts.join("");
  },
  async tool_required() {
    const forced = { model, tools, toolChoice: "required", prompt: hello };
    return (await generateText(forced)).toolCalls.map(({ toolName }) => toolName);
  },
  async structured() {
    const output = Output.object({ schema });
    return (await generateText({ model, output, prompt: cityQuestion })).output;
  },
  async structured_object() {
    return (await generateObject({ model, schema, prompt: cityQuestion })).object;
  },
  error: () => refused(() => generateText({ model: made("nope"), prompt: hello })),
  async cancel() {
    const leaving = new AbortController();
    const { textStream } = streamText({
      model, prompt: endless, abortSignal: leaving.signal, onError: () => {},
    });
    for await (const _ of textStream) break;
    leaving.abort();
  },
  async warm() {
    const messages = [{ role: "user", content: told }];
    const first = await generateText({ model, messages });
    const responses = first.responseMessages ?? first.response.messages;
    messages.push(...responses, { role: "user", content: again });
    const { usage } = await generateText({ model, messages });
    return [usage.inputTokens, usage.inputTokenDetails?.cacheReadTokens ?? usage.cachedInputTokens];
  },
});
