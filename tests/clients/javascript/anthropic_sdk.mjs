// Anthropic's SDK for JavaScript as its own documentation shows it.

import {
  again, cityQuestion, endless, hello, key, load, model, refused, run, told, url, weather,
  weatherQuestion,
} from "./features.mjs";

const { default: Anthropic } = await load("@anthropic-ai/sdk");
const { betaZodTool } = await load("@anthropic-ai/sdk/helpers/beta/zod");
const { zodOutputFormat } = await load("@anthropic-ai/sdk/helpers/zod");
const { z } = await load("zod");

const client = new Anthropic({ baseURL: url, apiKey: key });
const asked = (content, more = {}) => ({
  model, max_tokens: 2000, messages: [{ role: "user", content }], ...more,
});
const textOf = (message) =>
  message.content.filter(({ type }) => type === "text").map(({ text }) => text).join("");
const City = z.object({ city: z.string(), people: z.number().int() });
const tools = [{
  name: "weather",
  description: "Tell the weather.",
  input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
}];

async function tool(more = {}) {
  const request = asked(weatherQuestion, { tools });
  const first = await client.messages.create({ ...request, ...more });
  const content = first.content
    .filter(({ type }) => type === "tool_use")
    .map(({ id, input }) => ({ type: "tool_result", tool_use_id: id, content: weather(input) }));
  request.messages.push({ role: "assistant", content: first.content }, { role: "user", content });
  return textOf(await client.messages.create(request));
}

await run({
  async plain() {
    return textOf(await client.messages.create(asked(hello)));
  },
  async streamed() {
    const parts = [];
    const stream = client.messages.stream(asked(hello)).on("text", (text) => parts.push(text));
    await stream.finalMessage();
    return parts;
  },
  tool: () => tool(),
  tool_required: () => tool({ tool_choice: { type: "any" } }),
  tool_named: () => tool({ tool_choice: { type: "tool", name: "weather" } }),
  async tool_runner() {
    const weatherTool = betaZodTool({
      name: "weather",
      description: "Tell the weather.",
      inputSchema: z.object({ city: z.string() }),
      run: weather,
    });
    return textOf(
      await client.beta.messages.toolRunner(asked(weatherQuestion, { tools: [weatherTool] })),
    );
  },
  async structured() {
    const output_config = { format: zodOutputFormat(City) };
    return (await client.messages.parse(asked(cityQuestion, { output_config }))).parsed_output;
  },
  error: () => refused(() => client.messages.create({ ...asked(hello), model: "nope" })),
  async cancel() {
    const stream = client.messages.stream({ ...asked(endless), max_tokens: 60000 });
    for await (const event of stream) if (event.type === "content_block_delta") break;
  },
  async warm() {
    const request = asked(told);
    const first = await client.messages.create(request);
    request.messages.push(
      { role: "assistant", content: first.content }, { role: "user", content: again },
    );
    const { usage } = await client.messages.create(request);
    const cached = usage.cache_read_input_tokens;
    return [cached + usage.input_tokens, cached];
  },
});
